#!/usr/bin/env python3
"""Checks the model of remote references (docs/dev/references.pml) exhaustively, and that it can fail at all."""
import shutil, unittest

from spin_model import Model, search
from unittest_main import main

MODEL = Model("references.pml")


@unittest.skipUnless(shutil.which("spin"), "spin is not installed")
class ReferencesModel(unittest.TestCase):
    def test_no_owner_lets_go_too_early_or_never(self):
        self.assertEqual(search(MODEL.text), 0)

    def test_control_messages_may_take_effect_twice(self):
        self.assertEqual(search(MODEL.text, "-DTWICE"), 0)

    def test_a_parent_that_does_not_wait_for_its_child_would_end_too_early(self):
        self.assertGreater(search(MODEL.mutated("!pending_a && !holds_a -> user_a = 0", "!pending_a -> user_a = 0")), 0)

    def test_a_user_that_does_not_wait_for_its_owner_would_leave_the_value_for_ever(self):
        self.assertGreater(search(MODEL.mutated("user_c && !handle_c && !pending_c ->", "user_c && !handle_c ->")), 0)

    def test_an_owner_that_lets_go_before_the_call_has_come_would_lose_whoever_called(self):
        self.assertGreater(search(MODEL.mutated("has_a || has_b || has_c || !made", "has_a || has_b || has_c")), 0)


if __name__ == "__main__":
    main()
