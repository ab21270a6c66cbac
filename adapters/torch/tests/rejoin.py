"""A rank under torchrun: makes and destroys the default group again and again, and starts a process with its own
environment that joins the processes of the other ranks, while the group goes on. Prints "all is well" and its rank."""

import datetime
import os
import subprocess
import sys

import torch
import torch.distributed as dist

import chorale_torch  # noqa: F401

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROUNDS, CHILDREN = 20, 5


def check_sums(base, times=1):
    """Sums that nobody else computes: a wrong partner shows."""
    for i in range(times):
        for count in (1, 5000):
            x = torch.arange(count, dtype=torch.int64) * (RANK + 1) + base + i
            dist.all_reduce(x)
            expected = torch.arange(count, dtype=torch.int64) * (SIZE * (SIZE + 1) // 2) + SIZE * (base + i)
            assert torch.equal(x, expected), (base, x[0], expected[0])


def init():
    dist.init_process_group("chorale", timeout=datetime.timedelta(seconds=60))


def as_child():
    init()
    check_sums(1_000_000_000, times=5)
    dist.destroy_process_group()


def as_rank():
    for round in range(ROUNDS):
        init()
        check_sums(round * 1_000_000)
        dist.destroy_process_group()
    init()
    for start in range(CHILDREN):
        child = subprocess.Popen([sys.executable, __file__, "child"])
        ended = torch.zeros(1, dtype=torch.int64)
        i = 0
        while ended.item() < SIZE:  # as often on one rank as on the other
            check_sums(i := i + 1)
            ended = torch.tensor([int(child.poll() is not None)])
            dist.all_reduce(ended)
        assert child.wait() == 0, (start, child.returncode)
    dist.destroy_process_group()
    print("all is well", RANK, flush=True)


if sys.argv[1:] == ["child"]:
    as_child()
else:
    as_rank()
