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

    def test_nor_with_a_third_user_whose_messages_are_lost_or_come_again(self):
        self.assertEqual(search(MODEL.text, "-DTHREE", "-DLOSE"), 0)
        self.assertEqual(search(MODEL.text, "-DTHREE", "-DREPEAT"), 0)

    def test_control_messages_may_be_lost_and_come_again_at_any_time(self):
        self.assertEqual(search(MODEL.text, "-DLOSE", "-DREPEAT"), 0)

    def test_a_sender_that_gives_up_leaves_the_value_and_never_takes_it_away(self):
        self.assertEqual(search(MODEL.text, "-DLOSE", "-DREPEAT", "-DGIVE_UP"), 0)

    def test_nor_if_it_has_passed_the_reference_on(self):
        self.assertEqual(search(MODEL.text, "-DTHREE", "-DLOSE", "-DGIVE_UP"), 0)
        hasty = MODEL.mutated("owes_a && !holds_b ->", "owes_a ->")
        self.assertGreater(search(hasty, "-DTHREE", "-DLOSE", "-DGIVE_UP"), 0)

    def test_a_parent_that_does_not_wait_for_its_child_would_end_too_early(self):
        self.assertGreater(search(MODEL.mutated("!pending_a && !holds_a -> user_a = 0", "!pending_a -> user_a = 0")), 0)

    def test_a_user_that_does_not_wait_for_its_owner_would_leave_the_value_for_ever(self):
        self.assertGreater(search(MODEL.mutated("!handle_b && !pending_b && !holds_b ->", "!handle_b && !holds_b ->")), 0)

    def test_an_owner_that_lets_go_before_the_call_has_come_would_lose_whoever_called(self):
        self.assertGreater(search(MODEL.mutated("has_a || has_b || has_c || !made", "has_a || has_b || has_c")), 0)

    def test_a_message_that_is_heard_again_would_bring_back_a_user_that_has_ended(self):
        self.assertGreater(search(MODEL.mutated("if :: heard_##m :: else -> heard_##m = 1; effect fi", "effect"),
                                  "-DREPEAT"), 0)

    def test_messages_that_are_not_sent_again_would_leave_the_value_for_ever(self):
        lost = "  :: atomic { asks_##m && !m && !answer_##m -> m = 1 }\n#else"
        once = MODEL.mutated("    \\\n" + lost, "\n#else")
        self.assertGreater(search(once, "-DLOSE"), 0)


if __name__ == "__main__":
    main()
