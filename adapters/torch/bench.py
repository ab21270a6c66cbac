"""gloo against chorale under PyTorch, in one run that takes turns: two processes, of one thread and on one core each,
that know nothing of us, and two that import chorale_torch.

  python bench.py [--part all_reduce,ddp,fsdp] [--rounds 7] [--json FILE] [--readme]

all_reduce: dist.all_reduce from Python. Before each timed call every rank writes its tensor, as a backward pass does, and
  passes a barrier. "alone" is the call for one element in a group of one rank: what Python and PyTorch take around any
  backend. The ratio is gloo's time over ours.
ddp: training steps of bench/peers/torch_steps.py, local, under DistributedDataParallel, and "alone": under it in a group of one
  rank, which is PyTorch's own part of the overhead. The ratio is our overhead over gloo's, each over local steps in the same
  processes; "beyond" is the same over steps alone.
fsdp: the same steps of bert_256x4 under fully_shard. The ratio is gloo's time over ours.
Medians over all rounds, of rank 0. --readme writes the table into README.md, where it says so.
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
MARKS = ("<!-- made by bench.py --readme -->\n", "<!-- until here -->\n")
MODELS = ("tinymlp", "mlp512x4", "cnn_fashion", "bert_256x4")


# ---- in a rank


class Rank:
    """Does what the program asks for; every answer is a list of seconds."""

    def __init__(self, rank, backend, folder):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        if backend == "chorale":
            import chorale_torch  # noqa: F401
        torch.set_num_threads(1)
        dist.init_process_group(backend, rank=rank, world_size=2, store=dist.FileStore(f"{folder}/{backend}", 2))
        self.alone = dist.new_group([rank], use_local_synchronization=True)
        self.steps = {}

    def all_reduce(self, size, count, alone=False):
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


def medians(rounds, questions, unit):
    """The median of each question's answers, so many units per second; they take turns."""
    answers = {label: [] for label in questions}
    for _ in range(rounds):
        for label, (pair, request) in questions.items():
            answers[label] += pair.ask(*request)
    return {label: statistics.median(values) * unit for label, values in answers.items()}


def rows_of_all_reduce(gloo, chorale, rounds):
    for size, bar in CALL_BARS.items():
        count = 200 if size <= 1 << 16 else 30 if size <= 1 << 20 else 4
        ask = ("all_reduce", size, count)
        us = medians(rounds, {"gloo": (gloo, ask), "our alone": (chorale, ("all_reduce", 4, 50, True)),
                              "chorale": (chorale, ask)}, unit=1e6)
        size = f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
        ratio = us["gloo"] / us["chorale"]
        yield dict(what=f"all_reduce of {size}", unit="µs", **us, ratio=ratio, bar=f"≥ {bar}", met=ratio >= bar)


def rows_of_ddp(gloo, chorale, rounds):
    for model in MODELS:
        count = max(3, torch_steps.workloads()[model][3] // 4)
        ask = lambda pair, how: (pair, ("train", model, how, count))  # noqa: E731
        ms = medians(rounds, {"its local": ask(gloo, "local"), "our local": ask(chorale, "local"),
                              "its alone": ask(gloo, "alone"), "our alone": ask(chorale, "alone"),
                              "gloo": ask(gloo, "ddp"), "chorale": ask(chorale, "ddp")}, unit=1e3)
        over = lambda floor: ((ms["chorale"] - ms[f"our {floor}"]) /  # noqa: E731
                              max(ms["gloo"] - ms[f"its {floor}"], 1e-9))
        yield dict(what=f"step of {model}, DDP", unit="ms", **ms, beyond=over("alone"), ratio=over("local"),
                   bar=f"≤ {STEP_BAR}", met=over("local") <= STEP_BAR)


def rows_of_fsdp(gloo, chorale, rounds):
    ask = ("train", "bert_256x4", "fsdp", 3)
    ms = medians(rounds, {"gloo": (gloo, ask), "chorale": (chorale, ask)}, unit=1e3)
    ratio = ms["gloo"] / ms["chorale"]
    yield dict(what="step of bert_256x4, FSDP2", unit="ms", **ms, ratio=ratio, bar="> 1", met=ratio > 1)


PARTS = {"all_reduce": rows_of_all_reduce, "ddp": rows_of_ddp, "fsdp": rows_of_fsdp}
COLUMNS = ("its local", "its alone", "gloo", "our local", "our alone", "chorale", "beyond", "ratio")
HEADINGS = ("", "unit", *COLUMNS, "bar", "")


def cells(row):
    return [row["what"], row["unit"], *(f"{row[name]:.2f}" if name in row else "" for name in COLUMNS), row["bar"],
            "met" if row["met"] else "**not met**"]


def write_into_readme(rows):
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(cells(row) for row in rows)]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    path = HERE / "README.md"
    before, _, rest = path.read_text().partition(MARKS[0])
    path.write_text(before + MARKS[0] + table + MARKS[1] + rest.partition(MARKS[1])[2])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json")
    parser.add_argument("--readme", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        pairs = [Pair(backend, folder) for backend in ("gloo", "chorale")]
        widths = (26, 4, 10, 10, 10, 10, 10, 10, 7, 7, 7, 12)
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
    if options.readme:
        write_into_readme(rows)


if __name__ == "__main__":
    main()
