#!/usr/bin/env python3
"""The short form of the table of hostile runs (tests/hostile/run).

  hostile_test.py BIN      BIN is the folder of the built programs
"""
import pathlib
import re
import subprocess
import sys
import unittest

from unittest_main import main

TABLE = pathlib.Path(__file__).resolve().parent / "hostile" / "run"
BIN = sys.argv.pop(1)


class Hostile(unittest.TestCase):
    def test_the_short_form(self):
        done = subprocess.run([TABLE, "--bin", BIN], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        ran, rows, failed = map(int, re.search(r"^(\d+) rows of (\d+), (\d+) failed", done.stdout, re.MULTILINE).groups())
        self.assertGreaterEqual(rows, 200)
        self.assertGreaterEqual(ran, 100)
        self.assertEqual(failed, 0)


if __name__ == "__main__":
    main()
