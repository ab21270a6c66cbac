"""The ways to start ranks, and what the environment decides. CHORALE_TORCH_INSTALLED=1: with the installed package."""

import os
import pathlib
import socket
import subprocess
import sys

ADAPTER = pathlib.Path(__file__).resolve().parent.parent


def run(tmp_path, *options, program=ADAPTER / "example" / "all_reduce.py", words="done", **environment):
    values = dict(os.environ, OMP_NUM_THREADS="1", CHORALE_FLIGHT_DIR=str(tmp_path), **environment)
    if os.environ.get("CHORALE_TORCH_INSTALLED") != "1":
        values["PYTHONPATH"] = os.pathsep.join([str(ADAPTER), values.get("PYTHONPATH", "")])
    result = subprocess.run([sys.executable, *options, str(program)], env=values,
                            cwd=tmp_path, text=True, timeout=300, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert result.returncode == 0, result.stdout
    assert f"{words} 0" in result.stdout and f"{words} 1" in result.stdout, result.stdout


def torchrun():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"


def test_torchrun(tmp_path):
    run(tmp_path, *torchrun())


def test_groups_are_made_again_and_children_join_under_torchrun(tmp_path):
    run(tmp_path, *torchrun(), program=ADAPTER / "tests" / "rejoin.py", words="all is well")


def test_spawn(tmp_path):
    run(tmp_path)


def test_without_our_allocator(tmp_path):
    run(tmp_path, CHORALE_TORCH_ALLOCATOR="0")
