"""Runs tools/gpu_results on a program that plays gpu_test, and tools/spec_coverage on what it writes."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOLS = pathlib.Path(__file__).resolve().parent
# Writes googletest's form. Shard 0 has a test that passes and one that was skipped, shard 1 one that passes (or dies, or fails).
PROGRAM = """#!/usr/bin/env python3
import os, sys
if "--gtest_also_run_disabled_tests" in sys.argv:
    print("figure: step: 3 ms")
    sys.exit("{what}" == "slow")
out = [a for a in sys.argv if a.startswith("--gtest_output=xml:")][0].split(":", 1)[1]
assert sys.argv[-1] == "--gtest_color=no"
what = "{what}" if os.environ["GTEST_SHARD_INDEX"] == "1" else "skip"
if what == "die":
    print("last words")
    os.abort()
def case(name, inside="", result="completed"):
    return f'<testcase name="{{name}}" file="/x/src/chorale/comm/cuda/a_cuda_test.cc" status="run" result="{{result}}" time="0.5" classname="Gpu">{{inside}}</testcase>'
cases = {{"skip": case("One") + case("Left", "<skipped/>", "skipped"), "pass": case("Two"), "slow": case("Two"), "fail": case("Two", '<failure message="1 is not 2"/>')}}[what]
open(out, "w").write("<testsuites><testsuite name='Gpu'>" + cases + "</testsuite></testsuites>")
sys.exit(what == "fail")
"""
SPEC = "## Part\n| id | what |\n|---|---|\n| `test_one` [gpu] | x |\n| `test_two` [gpu] | x |\n| `test_left` [gpu] | x |\n"
TEST = "".join(f"// {'spec'}: {row}\nTEST(Gpu, {name}) {{}}\n" for row, name in {"test_one": "One", "test_two": "Two", "test_left": "Left"}.items())


class GpuResults(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)
        self.results = self.folder / "results.xml"

    def run_with(self, what):
        program = self.folder / "gpu_test"
        program.write_text(PROGRAM.format(what=what))
        program.chmod(0o755)
        return subprocess.run([sys.executable, TOOLS / "gpu_results", "run", program, self.results, "--shards", "2", "--commit", "abc", "--figures", "--", "--gtest_color=no"],
                              capture_output=True, text=True)

    def coverage(self):
        for name, text in {"spec/gpu.md": SPEC, "src/chorale/comm/cuda/a_cuda_test.cc": TEST}.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return subprocess.run([sys.executable, TOOLS / "spec_coverage", self.folder, "--gpu", "--ran", self.results, "--spec", self.folder / "spec"],
                              capture_output=True, text=True)

    def test_what_ran_and_passed_is_counted(self):
        done = self.run_with("pass")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("2 passed, 0 failed, 1 not run", done.stdout)
        counted = self.coverage()
        self.assertIn("2 of 3 rows proved", counted.stdout)
        self.assertIn("test_left: Gpu.Left did not run", counted.stdout)

    def test_a_failure_is_told_and_not_counted(self):
        done = self.run_with("fail")
        self.assertEqual(done.returncode, 1)
        self.assertIn("1 is not 2", done.stdout)
        self.assertIn("1 passed, 1 failed", done.stdout)
        self.assertIn("test_two: Gpu.Two failed", self.coverage().stdout)

    def test_a_shard_that_dies_is_a_failure(self):
        done = self.run_with("die")
        self.assertEqual(done.returncode, 1)
        self.assertIn("FAILED gpu.shard.1", done.stdout)
        self.assertIn("last words", done.stdout)

    def test_a_figure_that_cannot_be_taken_is_a_failure(self):
        done = self.run_with("slow")
        self.assertEqual(done.returncode, 1)
        self.assertIn("FAILED gpu.figures", done.stdout)

    def test_the_page_holds_the_last_run_alone(self):
        page = self.folder / "gpu.md"
        page.write_text("before\n<!-- last run: made by tools/gpu_results report -->\nolder\n<!-- end of the last run -->\nafter\n")
        self.run_with("pass")
        subprocess.run([sys.executable, TOOLS / "gpu_results", "report", self.results, page], check=True)
        text = page.read_text()
        self.assertIn("commit abc: 2 passed, 0 failed, 1 not run", text)
        self.assertIn("- step: 3 ms", text)
        self.assertNotIn("older", text)
        self.assertTrue(text.startswith("before\n") and text.endswith("after\n"))
        page.write_text("no marks")
        refused = subprocess.run([sys.executable, TOOLS / "gpu_results", "report", self.results, page], capture_output=True, text=True)
        self.assertIn("between which the last run stands", refused.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
