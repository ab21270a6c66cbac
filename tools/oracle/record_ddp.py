"""Records how PyTorch's DistributedDataParallel trains the benchmark models on 2 ranks (gloo).

  python3 tools/oracle/record_ddp.py      (PyTorch 2.15; see docs/dev/dependencies.md)

Weights and data are those of record_trajectories.py, each rank taking its half of a batch. Kept are, in f32 and f64, the mean of the
ranks' losses over 20 steps of AdamW, and the sums of absolute parameters after 20 steps of SGD (lr 0.05).
src/chorale/parallel/ddp_oracle_test.cc does the same and compares. Batch norm is that of each rank's half, with rank 0's buffers.
"""
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ops_oracle import DTYPES, Input
from record_trajectories import MODELS, ROOT, STEPS, fill


def train(rank, name, dtype, adam):
    make, shape, classes = MODELS[name]
    model = make().to(DTYPES[dtype])
    fill(model)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, weight_decay=0.01) if adam else torch.optim.SGD(ddp.parameters(), lr=0.05)
    half = slice(rank * shape[0] // 2, (rank + 1) * shape[0] // 2)
    losses = []
    for step in range(STEPS):
        if name == "bert_256x4":
            x = target = Input(shape, "i64", 1000 + step, 0, classes).tensor()[half]
        else:
            x = Input(shape, "f64", 1000 + step, -1.0, 1.0).tensor().to(DTYPES[dtype])[half]
            target = Input(shape[:1], "i64", 2000 + step, 0, classes).tensor()[half]
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(x).flatten(0, -2), target.flatten())
        loss.backward()
        optimizer.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / 2)
    return {"losses": losses} if adam else {"sums": {n: float(p.detach().double().abs().sum()) for n, p in model.named_parameters()}}


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    result = {}
    for name in MODELS:
        result[name] = {dtype: {**train(rank, name, dtype, True), **train(rank, name, dtype, False)} for dtype in ["f32", "f64"]}
        print(name, result[name]["f64"]["losses"][-1], flush=True)
    if rank == 0:
        path = ROOT / "tests" / "oracle" / "ddp.json"
        path.write_text(json.dumps({"torch": torch.__version__, **result}, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder,), nprocs=2)
