#!/usr/bin/env python3
"""Checks the model of the shared-memory protocol (docs/dev/shm.pml) exhaustively, and that it can fail at all."""
import shutil, unittest

from spin_model import Model, search
from unittest_main import main

MODEL = Model("shm.pml")


@unittest.skipUnless(shutil.which("spin"), "spin is not installed")
class ShmModel(unittest.TestCase):
    def test_two_ranks_one_death(self):
        self.assertEqual(search(MODEL.text, "-DN=2", "-DCALLS=3"), 0)

    def test_three_ranks_one_death(self):
        # Complete, for one call with its data in the slot; two calls of three ranks take too many states.
        self.assertEqual(search(MODEL.text, "-DN=3", "-DCALLS=1"), 0)

    def test_nothing_is_written_into_memory_taken_back(self):
        self.assertEqual(search(MODEL.text, "-DFENCE"), 0)

    def test_one_slot_would_not_be_enough(self):
        self.assertGreater(search(MODEL.mutated("((rank) * 2 + (call) % 2)", "((rank) * 2)"), "-DN=2", "-DDEATHS=0"), 0)

    def test_a_sleeper_that_does_not_look_again_would_be_lost(self):
        text = MODEL.mutated("     :: flag || dead[p]\n     :: else -> (bell", "     :: true -> (bell")
        self.assertGreater(search(text, "-DN=2", "-DDEATHS=0"), 0)

    def test_without_the_fence_a_late_write_would_land(self):
        self.assertGreater(search(MODEL.mutated(":: hands -> owner_sees = 1", ":: hands"), "-DFENCE"), 0)


if __name__ == "__main__":
    main()
