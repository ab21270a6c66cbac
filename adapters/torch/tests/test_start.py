"""The ways to start ranks, and what the environment decides."""

import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = """
import datetime, os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import chorale_torch

def main(rank=None, size=None):
    if rank is None:
        dist.init_process_group("chorale")
    else:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"])
        dist.init_process_group("cpu:chorale", rank=rank, world_size=size)
    x = torch.full((100_000,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    assert x.min() == x.max() == 3
    print("done", dist.get_rank())
    dist.destroy_process_group()

if __name__ == "__main__":
    if "PORT" in os.environ:
        mp.spawn(main, (2,), nprocs=2)
    else:
        main()
"""


def run(tmp_path, command, **environment):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    values = dict(os.environ, OMP_NUM_THREADS="1", CHORALE_FLIGHT_DIR=str(tmp_path), **environment)
    values["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), values.get("PYTHONPATH", "")])
    result = subprocess.run([sys.executable, *command, str(program)], env=values, text=True, timeout=120,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert result.returncode == 0, result.stdout
    return result.stdout


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_torchrun(tmp_path):
    output = run(tmp_path, ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"])
    assert "done 0" in output and "done 1" in output


def test_spawn(tmp_path):
    output = run(tmp_path, [], PORT=free_port())
    assert "done 0" in output and "done 1" in output


def test_without_our_allocator(tmp_path):
    run(tmp_path, [], PORT=free_port(), CHORALE_TORCH_ALLOCATOR="0")
