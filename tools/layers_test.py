"""Runs tools/layers on small trees."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parent / "layers"
TABLE = """
# chorale_layer(commented DEPS nothing)
chorale_layer(base)
chorale_layer(testing DEPS base)
chorale_layer(tensor OPTIONS -O3 DEPS base)
chorale_layer(op DEPS tensor TEST_DEPS eager)  # looks up in its tests
chorale_layer(eager
              DEPS op)
chorale_layer(app PROGRAM chorale LINKS eager DEPS ALL)
"""


class Layers(unittest.TestCase):
    def run_on(self, files, table=TABLE, args=(), headers=True):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {"cmake/layer_table.cmake": table, "src/chorale/base/x.h": "", **files}.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
                if headers and path.suffix == ".cc":
                    path.with_suffix(".h").touch()
            done = subprocess.run([sys.executable, TOOL, *args, root], capture_output=True, text=True)
            return done.returncode, done.stdout + done.stderr

    def assert_clean(self, files):
        self.assertEqual(self.run_on(files), (0, ""))

    def test_a_source_has_the_header_of_its_name_or_of_its_beginning_or_of_its_family(self):
        header = {"src/chorale/tensor/big_thing.h": ""}
        for name in ("big_thing.cc", "big_thing_print.cc", "big_thing_test.cc", "main.cc"):
            self.assertEqual(self.run_on({**header, f"src/chorale/tensor/{name}": ""}, headers=False), (0, ""))
        for name in ("print.cc", "big.cc", "big_thingprint.cc", "cuda/big_thing.cc"):
            code, output = self.run_on({**header, f"src/chorale/tensor/{name}": ""}, headers=False)
            self.assertEqual(code, 1)
            self.assertIn(f"src/chorale/tensor/{name}: no header of its name", output)
        command = "src/chorale/app/train.cc"
        self.assertEqual(self.run_on({command: '#include "chorale/app/commands.h"\n'}, headers=False), (0, ""))
        code, output = self.run_on({command: ""}, headers=False)
        self.assertEqual(code, 1)
        self.assertIn(f"{command}: includes none of the headers of its family: app/commands.h", output)

    def assert_fails(self, files, *expected, table=TABLE):
        code, output = self.run_on(files, table)
        self.assertEqual(code, 1, output)
        for text in expected:
            self.assertIn(text, output)

    def test_a_listed_include_passes(self):
        self.assert_clean({"src/chorale/op/cpu/a.cc": '#include "chorale/tensor/t.h"\n#include "chorale/op/cpu/a.h"\n'})

    def test_what_a_listed_layer_may_include_passes(self):
        self.assert_clean({"src/chorale/app/a.cc": '#include "chorale/base/x.h"\n'})

    def test_an_unlisted_include_fails_with_file_line_and_what_is_allowed(self):
        self.assert_fails(
            {"src/chorale/tensor/a.h": '#pragma once\n#include <vector>\n#  include "chorale/op/o.h"\n'},
            "src/chorale/tensor/a.h:3: tensor includes op; allowed: tensor, base",
        )

    def test_a_layer_that_does_not_exist_fails(self):
        self.assert_fails({"src/chorale/base/a.cc": '#include "chorale/bsae/x.h"\n'}, "base includes bsae")

    def test_test_deps_are_for_tests_only(self):
        line = '#include "chorale/eager/run.h"\n'
        self.assert_clean({"src/chorale/op/a_test.cc": line, "src/chorale/op/a_test_util.h": line})
        self.assert_fails({"src/chorale/op/a.cc": line}, "src/chorale/op/a.cc:1")
        self.assert_fails({"src/chorale/tensor/a_test.cc": line}, "src/chorale/tensor/a_test.cc:1")

    def test_test_helpers_are_for_tests_only(self):
        line = '#include "chorale/testing/watchdog_test_util.h"\n'
        self.assert_clean({"src/chorale/op/a_test.cc": line})
        self.assert_fails({"src/chorale/op/a.cc": line}, "op includes testing; allowed: op, base, tensor")
        self.assert_fails({"src/chorale/op/a.cc": '#include "chorale/op/x_test_util.h"\n'}, "for tests only")

    def test_a_folder_without_a_line_fails(self):
        self.assert_fails({"src/chorale/stray/a.h": ""}, "no chorale_layer(stray ...)")

    def test_a_dependency_upwards_in_the_table_fails(self):
        self.assert_fails({}, "names b, which is not listed above", table="chorale_layer(a DEPS b)\nchorale_layer(b DEPS a)\n")

    def test_the_table_for_people_must_say_the_same(self):
        def rows(*lines):
            return {"docs/dev/style.md": "\n".join(("| layer | folder | holds | may include |", *lines)) + "\n"}

        table = "chorale_layer(base)\nchorale_layer(testing DEPS base)\nchorale_layer(tensor DEPS base)\n"
        good = ("| 0 | `base` | errors | – |", "| 1 | `testing` | tests | base |", "| 2 | `tensor` | bytes | base |")
        self.assertEqual(self.run_on(rows(*good, "| 5 | `graph` | planned: traces | tensor |"), table), (0, ""))
        self.assert_fails(rows(*good[:2], "| 2 | `tensor` | bytes | base, testing |"),
                          "tensor may include base, testing; cmake/layer_table.cmake says base", table=table)
        self.assert_fails(rows(*good[:2]), "no row for the layer tensor", table=table)
        self.assert_fails(rows(*good, "| 5 | `graph` | traces | tensor |"), "there is no layer graph", table=table)
        self.assert_fails(rows(*good[:2], "| 2 | `tensor` | planned: bytes | base |"), "tensor is there", table=table)

    def test_a_file_of_the_tour_that_is_missing_fails(self):
        tour = {"docs/dev/style.md": "1. `chorale/base/a.h` – first\n   and again: `base/a.h`\n", "src/chorale/base/a.h": ""}
        self.assertEqual(self.run_on(tour), (0, ""))
        tour["docs/dev/style.md"] += "2. `base/a.h` – here\n   – and `base/b.h`, which is gone\n"
        self.assert_fails(tour, "docs/dev/style.md:4: there is no file base/b.h")

    def test_needed_is_what_a_layer_and_its_tests_include(self):
        self.assertEqual(self.run_on({}, args=["--needed", "tensor"]), (0, "base;tensor;testing\n"))
        self.assertEqual(self.run_on({}, args=["--needed", "op,base"]), (0, "base;eager;op;tensor;testing\n"))
        code, output = self.run_on({}, args=["--needed", "opp"])
        self.assertEqual(code, 1)
        self.assertIn("no layer opp", output)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
