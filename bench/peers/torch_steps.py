"""PyTorch training steps on the CPU, alone and under DDP over gloo, as the peer to stand beside; over chorale with --backend.

  python3 torch_steps.py WORLD THREADS [--json FILE] [--model tinymlp,...] [--compile] [--steps N] [--backend gloo] [--mode local,ddp]
  python3 torch_steps.py 1 1 --serve --model tinymlp [--compile] [--bf16] [--started S]

One row per model and mode: median milliseconds per step (zero_grad, forward, loss, backward, AdamW step), first-step
seconds and peak resident memory of rank 0. Models, shapes and optimizer are spelled out in docs/dev/bench.md.

--serve is the peer of `chorale bench steps`: it trains one model without a group. After the first step it prints a line of JSON;
then it answers each line with a number N by N steps and such a line: ms (median of those steps), first_ms (since --started, a
reading of the monotonic clock), base_mib (resident after the imports), peak_mib.
"""
import argparse, contextlib, json, os, resource, statistics, sys, time

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # AMX code dies on virtual machines that hide the tiles
import torch, torch.distributed as dist, torch.nn.functional as F, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from torch_models import Encoder, cnn, mlp


def workloads():
    ids = torch.randint(0, 8192, (8, 128))
    labels = torch.randint(0, 10, (32,))
    return {
        "tinymlp": (lambda: mlp([20, 32, 10]), torch.randn(8, 20), torch.zeros(8, dtype=torch.long), 300),
        "mlp512x4": (lambda: mlp([512] * 5 + [10]), torch.randn(32, 512), labels, 60),
        "cnn_fashion": (cnn, torch.randn(32, 1, 28, 28), labels, 20),
        "bert_256x4": (Encoder, ids, ids.flatten(), 6),
    }


def run(rank, world, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=args.port, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(args.threads)
    if args.backend == "chorale":
        import chorale_torch  # adapters/torch, installed or in PYTHONPATH
    dist.init_process_group(args.backend, rank=rank, world_size=world)
    rows = []
    for name in args.model.split(","):
        for mode in args.mode.split(","):
            torch.manual_seed(0)
            make, x, target, steps = workloads()[name]
            steps = args.steps or steps
            model = make()
            model = DistributedDataParallel(model) if mode == "ddp" else model
            model = torch.compile(model) if args.compile else model
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

            def step():
                optimizer.zero_grad()
                F.cross_entropy(model(x).flatten(0, -2), target).backward()
                optimizer.step()

            dist.barrier()
            start = time.perf_counter()
            step()
            first = time.perf_counter() - start
            step()
            times = []
            for _ in range(steps):
                start = time.perf_counter()
                step()
                times.append(time.perf_counter() - start)
            row = dict(model=name, mode=mode, world=world, threads=args.threads, compiled=args.compile,
                       ms=statistics.median(times) * 1e3, first_s=first,
                       peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            if rank == 0:
                rows.append(row)
                print(f"{name:12} {mode:5} {row['ms']:>9.3f} ms  first {first:>6.2f} s  peak {row['peak_mib']:>6.0f} MiB", flush=True)
    if rank == 0 and args.json:
        with open(args.json, "w") as out:
            json.dump(rows, out)
    dist.destroy_process_group()


def peak_mib():  # getrusage() would count what the process had before exec
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def serve(args):
    base_mib = peak_mib()
    torch.set_num_threads(args.threads)
    make, x, target, _ = workloads()[args.model]
    model = make()
    forward = torch.compile(model) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    precision = (lambda: torch.autocast("cpu", torch.bfloat16)) if args.bf16 else contextlib.nullcontext

    def step():
        optimizer.zero_grad()
        with precision():
            loss = F.cross_entropy(forward(x).flatten(0, -2), target)
        loss.backward()
        optimizer.step()

    step()
    first_ms = (time.monotonic() - args.started) * 1e3
    times = []
    while True:
        print(json.dumps(dict(name="torch " + torch.__version__, ms=statistics.median(times) if times else 0, first_ms=first_ms,
                              base_mib=base_mib, peak_mib=peak_mib())), flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        times = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", type=int)
    parser.add_argument("threads", type=int)
    parser.add_argument("--model", default="tinymlp,mlp512x4,cnn_fashion,bert_256x4")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--mode", default="local,ddp")
    parser.add_argument("--port", default="29512")
    parser.add_argument("--json")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--started", type=float, default=time.monotonic())
    args = parser.parse_args()
    if args.serve:
        serve(args)
        sys.exit()
    mp.spawn(run, (args.world, args), nprocs=args.world)
