#!/usr/bin/env python3
"""Checks the model of the shared-memory protocol (docs/dev/shm.pml) exhaustively, and that it can fail at all."""
import pathlib, shutil, subprocess, sys, tempfile, unittest

from unittest_main import main

MODEL = pathlib.Path(__file__).resolve().parent.parent / "docs/dev/shm.pml"


def search(text, *options):
    """The number of errors that spin finds."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "shm.pml").write_text(text)
        run = subprocess.run(["spin", *options, "-search", "shm.pml"], cwd=folder, capture_output=True, text=True, timeout=250)
        lines = [line for line in run.stdout.splitlines() if "errors:" in line]
        assert len(lines) == 1, run.stdout + run.stderr
        return int(lines[0].split("errors:")[1])


def mutated(old, new):
    text = MODEL.read_text()
    assert text.count(old) == 1, old
    return text.replace(old, new)


@unittest.skipUnless(shutil.which("spin"), "spin is not installed")
class ShmModel(unittest.TestCase):
    def test_two_ranks_one_death(self):
        self.assertEqual(search(MODEL.read_text(), "-DN=2", "-DCALLS=3"), 0)

    def test_three_ranks_one_death(self):
        # Complete, for one call with its data in the slot; two calls of three ranks take too many states.
        self.assertEqual(search(MODEL.read_text(), "-DN=3", "-DCALLS=1"), 0)

    def test_nothing_is_written_into_memory_taken_back(self):
        self.assertEqual(search(MODEL.read_text(), "-DFENCE"), 0)

    def test_one_slot_would_not_be_enough(self):
        self.assertGreater(search(mutated("((rank) * 2 + (call) % 2)", "((rank) * 2)"), "-DN=2", "-DDEATHS=0"), 0)

    def test_a_sleeper_that_does_not_look_again_would_be_lost(self):
        text = mutated("     :: flag || dead[p]\n     :: else -> (bell", "     :: true -> (bell")
        self.assertGreater(search(text, "-DN=2", "-DDEATHS=0"), 0)

    def test_without_the_fence_a_late_write_would_land(self):
        self.assertGreater(search(mutated(":: hands -> owner_sees = 1", ":: hands"), "-DFENCE"), 0)


if __name__ == "__main__":
    main()
