#!/usr/bin/env python3
"""Checks the model of jobs that lose ranks (docs/dev/elastic.pml) exhaustively, and that it can fail at all."""
import os
import shutil
import unittest

from spin_model import Model, search
from unittest_main import main

MODEL = Model("elastic.pml")
SOAKING = "CHORALE_SOAK" in os.environ  # larger searches


@unittest.skipUnless(shutil.which("spin"), "spin is not installed")
class ElasticModel(unittest.TestCase):
    def test_three_nodes_agree_on_who_is_left(self):
        self.assertEqual(search(MODEL.text, "-DN=3", "-DDEATHS=0", "-DCUTS=1"), 0)
        self.assertEqual(search(MODEL.text, "-DN=3", "-DDEATHS=1", "-DCUTS=0", "-DLOSSES=1"), 0)
        if SOAKING:
            self.assertEqual(search(MODEL.text, "-DN=3", "-DTRIES=2", "-DDEATHS=0", "-DCUTS=1"), 0)
            self.assertEqual(search(MODEL.text, "-DN=3", "-DTRIES=2", "-DDEATHS=1", "-DCUTS=0"), 0)
            self.assertEqual(search(MODEL.text, "-DN=3", "-DPROPOSERS=3", "-DDEATHS=0", "-DCUTS=1"), 0)

    def test_four_nodes_agree_on_who_is_left(self):
        self.assertEqual(search(MODEL.text, "-DN=4", "-DDEATHS=0", "-DCUTS=1"), 0)
        if SOAKING:
            self.assertEqual(search(MODEL.text, "-DN=4", "-DDEATHS=1", "-DCUTS=0"), 0)

    def test_three_nodes_go_on_without_that_of_the_store(self):
        text = MODEL.mutated("  assert(QUORUM(value, members[i]));\n", "  assert(!dead[0] || value & 1);\n")
        self.assertGreater(search(text, "-DN=3", "-DDECISIONS=1", "-DDEATHS=1", "-DCUTS=0"), 0)

    def test_two_nodes_end_with_that_of_the_store(self):
        text = MODEL.mutated("  assert(QUORUM(value, members[i]));\n", "  assert(value & 1);\n")
        self.assertEqual(search(text, "-DN=2", "-DTRIES=2", "-DDEATHS=1", "-DCUTS=1"), 0)

    def test_two_halves_would_split(self):
        text = MODEL.mutated("(2 * BITS(m) == BITS(of) && ((m) & LOWEST(of)))", "2 * BITS(m) == BITS(of)")
        self.assertGreater(search(text, "-DN=2", "-DDECISIONS=1", "-DDEATHS=0", "-DCUTS=1"), 0)

    def test_a_proposal_that_was_half_made_must_be_taken_up(self):
        text = MODEL.mutated(":: best == 0 -> value = seen", ":: value = seen")
        self.assertGreater(search(text, "-DN=3", "-DDECISIONS=1", "-DDEATHS=0", "-DCUTS=0", "-DLOSSES=1"), 0)

    def test_a_node_that_has_gone_on_must_not_vote_about_what_is_past(self):
        text = MODEL.mutated("promised[j] < ballot))", "promised[j] < ballot) || about[j] > number)")
        text = text.replace(":: about[j] < number -> about[j] = number;", ":: about[j] != number -> about[j] = number;")
        self.assertGreater(search(text, "-DN=3", "-DTRIES=2", "-DDEATHS=0", "-DCUTS=1"), 0)

    def test_survivors_apply_a_step_together(self):
        self.assertEqual(search(MODEL.text, "-DCOMMIT", "-DDEATHS=2"), 0)

    def test_a_step_that_one_has_applied_must_be_applied_by_all(self):
        text = MODEL.mutated("(SAYS(0) || SAYS(1) || SAYS(2))", "(SAYS(0) && SAYS(1) && SAYS(2))")
        self.assertGreater(search(text, "-DCOMMIT", "-DDEATHS=1"), 0)

    def test_nobody_may_pass_before_all_have_come(self):
        text = MODEL.mutated(":: entered[0] && entered[1] && entered[2] ->", ":: true ->")
        self.assertGreater(search(text, "-DCOMMIT", "-DDEATHS=1"), 0)


if __name__ == "__main__":
    main()
