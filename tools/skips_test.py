"""Runs tools/skips on results as ctest writes them, and ends files of unittest as tests/unittest_main.py does."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = """<?xml version="1.0" encoding="UTF-8"?>
<testsuite name="Linux-g++" tests="3" failures="0" disabled="0" skipped="2">
  <testcase name="base.Cpu.Runs" classname="base.Cpu.Runs" time="0.1" status="run"><system-out>fine</system-out></testcase>
  <testcase name="base.Cpu.Model" classname="base.Cpu.Model" time="0.1" status="notrun">
    <skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
    <system-out>x.cc:33: Skipped
no model here
</system-out>
  </testcase>
  <testcase name="tests.mpi_test" classname="tests.mpi_test" time="0.1" status="notrun">
    <skipped message="SKIP_RETURN_CODE=77"/><system-out>skipped: MpiGroups: no mpirun
</system-out>
  </testcase>
</testsuite>
"""


class Skips(unittest.TestCase):
    def run_on(self, allowed):
        with tempfile.TemporaryDirectory() as folder:
            results, names = pathlib.Path(folder) / "results.xml", pathlib.Path(folder) / "allowed"
            results.write_text(RESULTS)
            names.write_text(allowed)
            done = subprocess.run([sys.executable, ROOT / "tools/skips", results, "--allowed", names], capture_output=True, text=True)
            return done.returncode, done.stdout + done.stderr

    def test_what_is_not_in_the_list_is_an_error_with_its_reason(self):
        code, output = self.run_on("base.Cpu.Model  # not every container shows it\n")
        self.assertEqual(code, 1)
        self.assertIn("skipped (allowed): base.Cpu.Model: no model here", output)
        self.assertIn("skipped (NOT ALLOWED): tests.mpi_test: MpiGroups: no mpirun", output)

    def test_what_is_in_the_list_is_shown(self):
        self.assertEqual(self.run_on("# a remark\nbase.Cpu.Model  # why\ntests.mpi_test # why\n")[0], 0)

    def test_the_list_names_existing_tests_and_says_why(self):
        code, output = self.run_on("base.Cpu.Model  # why\ntests.mpi_test\nbase.Gone.Test  # why\n")
        self.assertEqual(code, 1)
        self.assertIn("there is no test base.Gone.Test", output)
        self.assertIn("tests.mpi_test does not say why", output)


class UnittestMain(unittest.TestCase):
    def end_of(self, *bodies):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "some_test.py"
            methods = "".join(f"    def test_{i}(self): {body}\n" for i, body in enumerate(bodies))
            path.write_text(f"import sys, unittest\nsys.path.insert(0, {str(ROOT / 'tests')!r})\nfrom unittest_main import main\n"
                            f"class Some(unittest.TestCase):\n{methods}main()\n")
            done = subprocess.run([sys.executable, path, folder], capture_output=True, text=True)
            return done.returncode, done.stderr

    def test_a_skip_is_told_to_ctest_and_a_failure_comes_first(self):
        self.assertEqual(self.end_of("pass")[0], 0)
        code, output = self.end_of("pass", "self.skipTest('no spin here')")
        self.assertEqual(code, 77)
        self.assertIn("no spin here", output)
        self.assertEqual(self.end_of("self.fail()", "self.skipTest('no spin here')")[0], 1)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
