"""Two ranks add up a tensor: torchrun --nproc-per-node=2 all_reduce.py, or python all_reduce.py, which spawns them."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import chorale_torch  # noqa: F401


def add_up():
    x = torch.full((100_000,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    assert x.min() == x.max() == 3
    print(f"done {dist.get_rank()}\n", end="")  # in one piece, beside another rank
    dist.destroy_process_group()


def spawned(rank, store):
    dist.init_process_group("cpu:chorale", init_method=f"file://{store}", rank=rank, world_size=2)
    add_up()


if __name__ == "__main__":
    if "RANK" in os.environ:  # by torchrun
        dist.init_process_group("chorale")
        add_up()
    else:
        mp.spawn(spawned, (os.path.abspath(f"store-{os.getpid()}"),), nprocs=2)
