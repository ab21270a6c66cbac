"""gloo against chorale under PyTorch, in one run on two processes of one thread each, taking turns.

  python bench.py [--part all_reduce,ddp,fsdp] [--rounds 5] [--json FILE]

all_reduce: dist.all_reduce from Python. Before each timed call every rank writes its tensor, as a backward pass does, and
  passes a barrier of that backend. "interpreter" is the call for one element in a group of one rank: what Python and
  PyTorch take around a backend.
ddp: training steps of bench/peers/torch_steps.py: local, and under DistributedDataParallel on each backend.
fsdp: the same steps of bert_256x4 under fully_shard on each backend.
Medians over all rounds, of rank 0.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "bench" / "peers")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import torch_steps  # noqa: E402

# The least that is asked for: how many times faster a call is, and which part of gloo's overhead a step may have.
CALL_BARS = {4 << 10: 10, 1 << 20: 8, 64 << 20: 5}
STEP_BAR = 0.25


def timed(call, count, before=lambda: None):
    times = []
    for _ in range(count):
        before()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def rows_of_all_reduce(groups, rounds):
    alone = dist.new_group([dist.get_rank()], backend="chorale", use_local_synchronization=True)
    one = torch.ones(1)
    for size, bar in CALL_BARS.items():
        x = torch.ones(size // 4)
        times = {name: [] for name in ("interpreter", *groups)}
        for _ in range(rounds):
            for name, group in groups.items():
                def before(group=group):
                    x.fill_(1)
                    dist.barrier(group=group)

                call = lambda group=group: dist.all_reduce(x, group=group)
                timed(call, 2)
                times[name] += timed(call, 200 if size <= 1 << 16 else 20 if size <= 1 << 20 else 3, before)
            times["interpreter"] += timed(lambda: dist.all_reduce(one, group=alone), 50)
        us = {name: statistics.median(values) * 1e6 for name, values in times.items()}
        yield dict(what=f"all_reduce {size >> 10} KiB", unit="us", **us, ratio=us["gloo"] / us["chorale"], bar=bar,
                   met=us["gloo"] / us["chorale"] >= bar)


def stepper(wrap, name):
    torch.manual_seed(0)
    make, x, target, count = torch_steps.workloads()[name]
    model = wrap(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), target).backward()
        optimizer.step()

    return step, count


def medians_of_steps(name, wraps, rounds):
    steps = {label: stepper(wrap, name) for label, wrap in wraps.items()}
    for step, _ in steps.values():
        for _ in range(3):
            step()
    times = {label: [] for label in wraps}
    for _ in range(rounds):
        for label, (step, count) in steps.items():
            dist.barrier()
            times[label] += timed(step, max(2, count // 3))
    return {label: statistics.median(values) * 1e3 for label, values in times.items()}


def rows_of_ddp(groups, rounds):
    for name in torch_steps.workloads():
        wraps = {"local": lambda model: model}
        for label, group in groups.items():
            wraps[label] = lambda model, group=group: DistributedDataParallel(model, process_group=group)
        ms = medians_of_steps(name, wraps, rounds)
        ratio = (ms["chorale"] - ms["local"]) / max(ms["gloo"] - ms["local"], 1e-9)
        yield dict(what=f"ddp {name}", unit="ms", **ms, ratio=ratio, bar=STEP_BAR, met=ratio <= STEP_BAR)


def rows_of_fsdp(groups, rounds):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def sharded(group):
        def wrap(model):
            mesh = DeviceMesh.from_group(group, "cpu")
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            return fully_shard(model, mesh=mesh)

        return wrap

    ms = medians_of_steps("bert_256x4", {label: sharded(group) for label, group in groups.items()}, rounds)
    yield dict(what="fsdp bert_256x4", unit="ms", **ms, ratio=ms["gloo"] / ms["chorale"], bar=1,
               met=ms["chorale"] < ms["gloo"])


PARTS = {"all_reduce": rows_of_all_reduce, "ddp": rows_of_ddp, "fsdp": rows_of_fsdp}


def run(rank, options):
    import chorale_torch  # noqa: F401

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=options.port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    groups = {"gloo": dist.group.WORLD, "chorale": dist.new_group(backend="chorale")}
    rows = []
    for part in options.part.split(","):
        for row in PARTS[part](groups, options.rounds):
            rows.append(row)
            if rank == 0:
                figures = "  ".join(f"{name} {value:.1f}" for name, value in row.items()
                                    if name in ("interpreter", "local", "gloo", "chorale"))
                print(f"{row['what']:20} [{row['unit']}]  {figures}  ratio {row['ratio']:.2f} (bar {row['bar']}) "
                      f"{'met' if row['met'] else 'NOT MET'}", flush=True)
    if rank == 0 and options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--port", default="29533")
    mp.spawn(run, (parser.parse_args(),), nprocs=2)
