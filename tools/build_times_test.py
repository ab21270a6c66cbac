"""Runs tools/build_times on a small log."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parent / "build_times"
LOG = """# ninja log v5
0\t9000\t1\tCMakeFiles/chorale_op.dir/Unity/unity_op_defs_1_cxx.cxx.o\taa
0\t4000\t2\tCMakeFiles/chorale_op.dir/Unity/unity_op_defs_1_cxx.cxx.o\tab
0\t2000\t3\tCMakeFiles/chorale_vec.dir/src/chorale/vec/rows.cc.o\tac
2000\t3000\t4\tCMakeFiles/chorale_program.dir/src/chorale/app/main.cc.o\tad
4000\t5000\t5\tlib/libchorale.so.0.1\tae
4000\t5000\t5\tlib/libchorale.so\tae
"""


class BuildTimes(unittest.TestCase):
    def run_on(self, *args, log=LOG):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "log"
            path.write_text(log)
            done = subprocess.run([sys.executable, TOOL, "--log", path, *args], capture_output=True, text=True)
            return done.returncode, done.stdout, done.stderr

    def test_the_last_line_of_an_output_counts_and_a_step_counts_once(self):
        code, out, _ = self.run_on()
        self.assertEqual(code, 0)
        self.assertIn("| op | 1 | 4.0 | 50 % |", out)
        self.assertIn("| vec | 1 | 2.0 | 25 % |", out)
        self.assertIn("| main functions | 1 | 1.0 | 12 % |", out)
        self.assertIn("| links, made sources | 1 | 1.0 | 12 % |", out)
        self.assertIn("| all | 4 | 8 | |", out)

    def test_the_slowest_steps_come_first(self):
        _, out, _ = self.run_on()
        steps = out[out.index("slowest"):].splitlines()
        self.assertEqual(steps[2:4], ["| group op_defs_1 | 4.0 |", "| vec/rows.cc | 2.0 |"])

    def test_times_are_scaled_to_the_cpu_time(self):
        _, out, _ = self.run_on("--cpu", "4")
        self.assertIn("| op | 1 | 2.0 | 50 % |", out)
        self.assertIn("| all | 4 | 4 | |", out)

    def test_more_than_the_limit_fails(self):
        self.assertEqual(self.run_on("--limit", "8")[0], 0)
        code, _, err = self.run_on("--limit", "7.9")
        self.assertEqual(code, 1)
        self.assertIn("takes 8 CPU-seconds", err)

    def test_an_empty_log_fails(self):
        code, _, err = self.run_on(log="# ninja log v5\n")
        self.assertEqual(code, 1)
        self.assertIn("no steps", err)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
