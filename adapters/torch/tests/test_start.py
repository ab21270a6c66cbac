"""The ways to start ranks, and what the environment decides, with the adapter as it was built in place; else, or with
CHORALE_TORCH_INSTALLED=1, with the installed package."""

import os
import pathlib
import socket
import subprocess
import sys
import tomllib

import pytest

ADAPTER = pathlib.Path(__file__).resolve().parent.parent
INSTALLED = (os.environ.get("CHORALE_TORCH_INSTALLED") == "1"
             or not any((ADAPTER / "chorale_torch").glob("_C*.so")))


def run(tmp_path, *options, program=ADAPTER / "example" / "all_reduce.py", words="done", **environment):
    values = dict(os.environ, OMP_NUM_THREADS="1", CHORALE_FLIGHT_DIR=str(tmp_path), **environment)
    if not INSTALLED:
        values["PYTHONPATH"] = os.pathsep.join([str(ADAPTER), str(tmp_path), values.get("PYTHONPATH", "")])
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


def test_a_switch_is_zero_or_one(tmp_path):
    with pytest.raises(AssertionError, match="CHORALE_TORCH_ALLOCATOR is 'no'; it takes 0 or 1"):
        run(tmp_path, CHORALE_TORCH_ALLOCATOR="no")


def test_needs_no_import(tmp_path):
    if not INSTALLED:  # what an installation leaves beside the package, by pyproject.toml
        project = tomllib.loads((ADAPTER / "pyproject.toml").read_text())["project"]
        info = tmp_path / "chorale_torch-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chorale_torch\nVersion: 0.1.0\n")
        lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
                 for group, entries in project["entry-points"].items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
    program = tmp_path / "program.py"
    program.write_text((ADAPTER / "example" / "all_reduce.py").read_text().replace("import chorale_torch", "# "))
    run(tmp_path, *torchrun(), program=program)
    run(tmp_path, program=program)
