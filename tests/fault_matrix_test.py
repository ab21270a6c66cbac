#!/usr/bin/env python3
"""A sample of the fault matrix (tests/fault_matrix): at least 300 cells, spread over all faults and calls.

  fault_matrix_test.py BIN      BIN is the folder of the built programs
"""
import pathlib
import re
import subprocess
import sys
import unittest

from unittest_main import main

MATRIX = pathlib.Path(__file__).resolve().parent / "fault_matrix"
BIN = sys.argv.pop(1)


class FaultMatrix(unittest.TestCase):
    def test_a_sample_of_all_cells(self):
        run = subprocess.run([MATRIX, "--bin", BIN], capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        cells, failed = re.search(r"^(\d+) cells, (\d+) failed", run.stdout, re.MULTILINE).groups()
        self.assertGreaterEqual(int(cells), 300)
        self.assertEqual(int(failed), 0)
        print(run.stdout)

    def test_random_rows_of_calls(self):
        run = subprocess.run([MATRIX, "--bin", BIN, "--soak", "60"], capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)

    def test_a_rank_that_sees_something_else_is_a_failure(self):
        # A barrier reduces nothing, so nobody sees an error.
        run = subprocess.run([MATRIX, "--bin", BIN, "wrong_op/barrier/shm/2/1/0"], capture_output=True, text=True)
        self.assertEqual(run.stdout.count("no error"), 2, run.stdout)
        self.assertEqual(run.returncode, 1)


if __name__ == "__main__":
    main()
