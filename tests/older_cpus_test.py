"""One build runs on processors without AVX-512 and without AVX: tried on emulated ones.

  older_cpus_test.py BIN_FOLDER
"""
import pathlib
import subprocess
import sys
import unittest

from unittest_main import main

BIN = pathlib.Path(sys.argv.pop(1))
# The oldest processor that we promise to run on, and the one of most laptops.
CPUS = {"Westmere": "SSE4", "Haswell": "AVX2"}


def run(cpu, program, *args):
    return subprocess.run(["qemu-x86_64", "-cpu", cpu, BIN / program, *args], capture_output=True, text=True)


class OlderCpus(unittest.TestCase):
    def check(self, program, *args):
        for cpu in CPUS:
            with self.subTest(cpu=cpu):
                done = run(cpu, program, *args)
                self.assertEqual(done.returncode, 0, (done.stdout + done.stderr)[-3000:])

    def test_doctor_names_the_vectors_in_use(self):
        for cpu, vectors in CPUS.items():
            with self.subTest(cpu=cpu):
                self.assertIn(f"vectors of {vectors}\n", run(cpu, "chorale", "doctor").stdout)

    def test_a_processor_too_old_is_told_so(self):
        done = run("core2duo", "chorale", "doctor")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("has no SSE4.2; Chorale needs a newer one", done.stderr)

    def test_vector_loops_are_right(self):
        # Some of each family: emulation is 20 times slower.
        self.check("vec_test", "--gtest_filter=Pointwise.*:PointwiseFloat.Awkward*:Convert.*:Move.*:Reduce.Rows*")


if __name__ == "__main__":
    main()
