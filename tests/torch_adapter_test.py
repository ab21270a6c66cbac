#!/usr/bin/env python3
"""A part of the adapter's own tests (adapters/torch/tests), where there is a PyTorch to run them with: CHORALE_TORCH_PYTHON,
or this interpreter, has torch and pytest, and the adapter is built in place or installed. Left out, with the reason,
elsewhere: PyTorch takes gigabytes.

  torch_adapter_test.py [BIN]
"""
import os
import pathlib
import subprocess
import sys

from unittest_main import SKIPPED

ADAPTER = pathlib.Path(__file__).resolve().parent.parent / "adapters" / "torch"
PYTHON = os.environ.get("CHORALE_TORCH_PYTHON", sys.executable)


def main():
    environment = dict(os.environ)
    if any((ADAPTER / "chorale_torch").glob("_C*.so")):  # built in place; else the installed one is meant
        environment["PYTHONPATH"] = os.pathsep.join([str(ADAPTER), os.environ.get("PYTHONPATH", "")])
    for module, advice in (("torch", "pip install torch"), ("pytest", "pip install pytest"),
                           ("chorale_torch", "python setup.py build_ext --inplace in adapters/torch")):
        if subprocess.run([PYTHON, "-c", f"import {module}"], env=environment, capture_output=True).returncode != 0:
            print(f"The tests of adapters/torch are left out: {PYTHON} cannot import {module} ({advice}).")
            return SKIPPED
    tests = [str(ADAPTER / "tests" / f"test_{name}.py") for name in ("collectives", "errors")]
    tests.append(f"{ADAPTER / 'tests' / 'test_training.py'}::test_ddp_equals_one_rank")
    return subprocess.run([PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
