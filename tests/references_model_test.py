#!/usr/bin/env python3
"""Checks the model of remote references (docs/dev/references.pml) exhaustively, and that it can fail at all."""
import pathlib, shutil, subprocess, tempfile, unittest

from unittest_main import main

MODEL = pathlib.Path(__file__).resolve().parent.parent / "docs/dev/references.pml"


def search(text, *options):
    """The number of errors that spin finds."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "references.pml").write_text(text)
        run = subprocess.run(
            ["spin", *options, "-search", "references.pml"], cwd=folder, capture_output=True, text=True, timeout=250
        )
        lines = [line for line in run.stdout.splitlines() if "errors:" in line]
        assert len(lines) == 1, run.stdout + run.stderr
        return int(lines[0].split("errors:")[1])


def mutated(old, new):
    text = MODEL.read_text()
    assert text.count(old) == 1, old
    return text.replace(old, new)


@unittest.skipUnless(shutil.which("spin"), "spin is not installed")
class ReferencesModel(unittest.TestCase):
    def test_no_owner_lets_go_too_early_or_never(self):
        self.assertEqual(search(MODEL.read_text()), 0)

    def test_control_messages_may_take_effect_twice(self):
        self.assertEqual(search(MODEL.read_text(), "-DTWICE"), 0)

    def test_a_parent_that_does_not_wait_for_its_child_would_end_too_early(self):
        self.assertGreater(search(mutated("!pending_a && !holds_a -> user_a = 0", "!pending_a -> user_a = 0")), 0)

    def test_a_user_that_does_not_wait_for_its_owner_would_leave_the_value_for_ever(self):
        self.assertGreater(search(mutated("user_c && !handle_c && !pending_c ->", "user_c && !handle_c ->")), 0)

    def test_an_owner_that_lets_go_before_the_call_has_come_would_lose_whoever_called(self):
        self.assertGreater(search(mutated("has_a || has_b || has_c || !made", "has_a || has_b || has_c")), 0)


if __name__ == "__main__":
    main()
