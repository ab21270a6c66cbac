"""gloo against chorale under PyTorch, in one run that takes turns: two processes of one thread each that know nothing of
us, and two that import chorale_torch.

  python bench.py [--part all_reduce,ddp,fsdp] [--rounds 7] [--json FILE] [--markdown FILE]

all_reduce: dist.all_reduce from Python. Before each timed call every rank writes its tensor, as a backward pass does, and
  passes a barrier. "alone" is the same call in a group of one rank: what Python and PyTorch take around a backend.
ddp: training steps of bench/peers/torch_steps.py, local and under DistributedDataParallel. Overheads are over local steps
  in the same processes; "alone" is the wrapper in a group of one rank: PyTorch's own part of the overhead.
fsdp: the same steps of bert_256x4 under fully_shard.
Medians over all rounds, of rank 0. The last columns are a ratio of gloo and chorale and the bar that it has to meet.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
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
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import torch_steps  # noqa: E402

# The least that is asked for: how many times faster a call is, and which part of gloo's overhead a step may have.
CALL_BARS = {4 << 10: 10, 1 << 20: 8, 64 << 20: 5}
STEP_BAR = 0.25
MODELS = ("tinymlp", "mlp512x4", "cnn_fashion", "bert_256x4")


# ---- in a rank


class Rank:
    """Does what the program asks for; every answer is a list of seconds."""

    def __init__(self, rank, backend, folder):
        if backend == "chorale":
            import chorale_torch  # noqa: F401
        torch.set_num_threads(1)
        dist.init_process_group(backend, rank=rank, world_size=2, store=dist.FileStore(f"{folder}/{backend}", 2))
        self.alone = dist.new_group([rank], use_local_synchronization=True)
        self.steps = {}

    def all_reduce(self, size, count, alone):
        group = self.alone if alone else dist.group.WORLD
        x = torch.ones(size // 4)
        times = []
        for at in range(count + 2):
            x.fill_(1)
            dist.barrier(group=group)
            start = time.perf_counter()
            dist.all_reduce(x, group=group)
            if at >= 2:
                times.append(time.perf_counter() - start)
        return times

    def train(self, model, how, count):
        step = self.steps.get((model, how)) or self.steps.setdefault((model, how), self.stepper(model, how))
        dist.barrier()
        times = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return times

    def stepper(self, name, how):
        torch.manual_seed(0)
        make, x, target, _ = torch_steps.workloads()[name]
        model = self.wrapped(make(), how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step():
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, -2), target).backward()
            optimizer.step()

        for _ in range(3):
            step()
        return step

    def wrapped(self, model, how):
        if how == "local":
            return model
        if how == "fsdp":
            for block in model.blocks:
                fully_shard(block)
            return fully_shard(model)
        return DistributedDataParallel(model, process_group=self.alone if how == "alone" else None)


def rank_main(rank, backend, folder, pipe):
    works = Rank(rank, backend, folder)
    while request := pipe.recv():
        pipe.send(getattr(works, request[0])(*request[1:]))
    dist.destroy_process_group()


# ---- the program


class Pair:
    """Two ranks on one backend."""

    def __init__(self, backend, folder):
        context = mp.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=rank_main, args=(rank, backend, folder, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def ask(self, *request):
        """What rank 0 answers, once both have."""
        for pipe in self.pipes:
            pipe.send(request)
        return [pipe.recv() for pipe in self.pipes][0]

    def end(self):
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()


def medians(rounds, questions):
    """The median of each question's answers; they take turns."""
    answers = {label: [] for label in questions}
    for _ in range(rounds):
        for label, (pair, request) in questions.items():
            answers[label] += pair.ask(*request)
    return {label: statistics.median(values) for label, values in answers.items()}


def rows_of_all_reduce(gloo, chorale, rounds):
    for size, bar in CALL_BARS.items():
        count = 200 if size <= 1 << 16 else 30 if size <= 1 << 20 else 4
        ask = ("all_reduce", size, count)
        us = medians(rounds, {"alone": (chorale, (*ask, True)), "gloo": (gloo, (*ask, False)),
                              "chorale": (chorale, (*ask, False))})
        size = f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
        ratio = us["gloo"] / us["chorale"]
        yield dict(what=f"all_reduce of {size}", unit="µs", **{name: value * 1e6 for name, value in us.items()},
                   ratio=ratio, bar=f"≥ {bar}", met=ratio >= bar)


def rows_of_ddp(gloo, chorale, rounds):
    for model in MODELS:
        count = max(3, torch_steps.workloads()[model][3] // 4)
        s = medians(rounds, {"local (gloo)": (gloo, ("train", model, "local", count)),
                             "local (chorale)": (chorale, ("train", model, "local", count)),
                             "alone": (chorale, ("train", model, "alone", count)),
                             "gloo": (gloo, ("train", model, "ddp", count)),
                             "chorale": (chorale, ("train", model, "ddp", count))})
        ratio = (s["chorale"] - s["local (chorale)"]) / max(s["gloo"] - s["local (gloo)"], 1e-9)
        yield dict(what=f"step of {model}, DDP", unit="ms", **{name: value * 1e3 for name, value in s.items()},
                   ratio=ratio, bar=f"≤ {STEP_BAR}", met=ratio <= STEP_BAR)


def rows_of_fsdp(gloo, chorale, rounds):
    s = medians(rounds, {"gloo": (gloo, ("train", "bert_256x4", "fsdp", 3)),
                         "chorale": (chorale, ("train", "bert_256x4", "fsdp", 3))})
    ratio = s["gloo"] / s["chorale"]
    yield dict(what="step of bert_256x4, FSDP2", unit="ms", **{name: value * 1e3 for name, value in s.items()},
               ratio=ratio, bar="> 1", met=ratio > 1)


PARTS = {"all_reduce": rows_of_all_reduce, "ddp": rows_of_ddp, "fsdp": rows_of_fsdp}
COLUMNS = ("local (gloo)", "gloo", "local (chorale)", "alone", "chorale")
HEADINGS = ("", "unit", *COLUMNS, "ratio", "bar", "")


def cells(row):
    return [row["what"], row["unit"], *(f"{row[name]:.2f}" if name in row else "" for name in COLUMNS),
            f"{row['ratio']:.2f}", row["bar"], "met" if row["met"] else "NOT MET"]


def markdown(rows):
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(cells(row) for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json")
    parser.add_argument("--markdown", help="the table, for a README")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        pairs = [Pair(backend, folder) for backend in ("gloo", "chorale")]
        widths = (26, 4, 12, 10, 15, 10, 10, 6, 6, 8)
        show = lambda line: print(*(f"{cell:>{width}}" for cell, width in zip(line, widths)), flush=True)  # noqa: E731
        show(HEADINGS)
        for part in options.part.split(","):
            for row in PARTS[part](*pairs, options.rounds):
                rows.append(row)
                show(cells(row))
        for pair in pairs:
            pair.end()
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    if options.markdown:
        pathlib.Path(options.markdown).write_text(markdown(rows))


if __name__ == "__main__":
    main()
