"""Fashion-MNIST under torchrun, as the peer of tests/kill_demo: every rank is started again when one dies, from the last checkpoint.

  torchrun --standalone --nproc-per-node 4 --max-restarts 1000 torch_elastic.py FOLDER STEPS [--model cnn] [--batch 128] [--save-every 100] [--backend gloo]

The models, AdamW with a one-cycle schedule up to 1e-3 and the data are those of `chorale train fashion-mnist`. FOLDER gets a line `STEP SECONDS` in steps.txt for
each step that rank 0 has done (by the clock that all processes share), `start STEP` where it began from a checkpoint, the checkpoint, and `accuracy` at the end.
"""
import argparse, gzip, os, pathlib, time

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # AMX code dies on virtual machines that hide the tiles
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_models import cnn

DATA = pathlib.Path("/usr/share/datasets/fashion-mnist")


def pictures(split):
    images = torch.frombuffer(bytearray(gzip.decompress((DATA / f"{split}-images-idx3-ubyte.gz").read_bytes())[16:]), dtype=torch.uint8)
    labels = torch.frombuffer(bytearray(gzip.decompress((DATA / f"{split}-labels-idx1-ubyte.gz").read_bytes())[8:]), dtype=torch.uint8)
    return images.view(-1, 1, 28, 28), labels.long()


def scaled(images):
    return (images.float() - 72.94) / 90.02


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--backend", default="gloo")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.backend == "chorale":
        import chorale_torch  # adapters/torch, installed or in PYTHONPATH
    dist.init_process_group(args.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    images, labels = pictures("train")
    torch.manual_seed(0)
    model = DistributedDataParallel(cnn() if args.model == "cnn" else
                                    nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=args.steps + 1)
    saved = args.folder / "checkpoint.pt"
    first = 0
    if saved.exists():
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = state["step"]
    lines = open(args.folder / "steps.txt", "a", buffering=1) if rank == 0 else None
    if lines:
        print("start", first, file=lines)
    per_epoch = len(labels) // args.batch
    for step in range(first, args.steps):
        epoch, place = divmod(step, per_epoch)
        if step == first or place == 0:
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        own = order[place * args.batch:(place + 1) * args.batch][rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(scaled(images[own])), labels[own]).backward()
        optimizer.step()
        schedule.step()
        if lines:
            print(step + 1, time.monotonic(), file=lines)
            if (step + 1) % args.save_every == 0:
                torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "step": step + 1}, f"{saved}.new")
                os.replace(f"{saved}.new", saved)
    if rank == 0:
        images, labels = pictures("t10k")
        model.eval()
        with torch.no_grad():
            right = sum(int((model.module(scaled(images[at:at + 500])).argmax(1) == labels[at:at + 500]).sum()) for at in range(0, len(labels), 500))
        (args.folder / "accuracy").write_text(str(100 * right / len(labels)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
