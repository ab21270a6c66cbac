"""The job of the README's first command, in a short form: a few steps must teach it most of Fashion-MNIST.

  train_test.py BIN_FOLDER
"""
import os
import pathlib
import re
import signal
import subprocess
import sys
import unittest

PROGRAM = pathlib.Path(sys.argv.pop(1)) / "chorale"


class Train(unittest.TestCase):
    def accuracy(self, *args):
        done = subprocess.run([PROGRAM, "train", "fashion-mnist", "--batch", "64", *args], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return float(re.search(r"test accuracy ([0-9.]+) % after [0-9]+ steps", done.stdout)[1])

    def start(self, ranks):
        run = subprocess.Popen([PROGRAM, "train", "fashion-mnist", "-n", ranks], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3):  # until the first step is done
            self.assertTrue(run.stdout.readline(), "it ended")
        return run

    def test_fashion_mnist_is_learnt(self):
        self.assertGreater(self.accuracy("--steps", "150", "-n", "1"), 80)

    def test_two_ranks_learn_it_together(self):
        self.assertGreater(self.accuracy("--steps", "60", "-n", "2"), 65)

    def test_an_interrupt_ends_all_ranks_after_the_same_step(self):
        for ranks in "1", "2":
            with self.subTest(ranks=ranks):
                run = self.start(ranks)
                run.send_signal(signal.SIGINT)
                out, err = run.communicate(timeout=60)
                self.assertIn("interrupted after step", out, err)
                self.assertEqual(run.returncode, 130, err)

    def test_a_killed_rank_is_named(self):
        run = self.start("2")
        children = pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        ranks = [pid for pid in children if b"RANK=1\0" in pathlib.Path(f"/proc/{pid}/environ").read_bytes()]
        os.kill(int(ranks[0]), signal.SIGKILL)
        out, err = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 128 + signal.SIGKILL, err)
        self.assertRegex(err, r"rank 1 .*killed by SIGKILL")

    def test_wrong_arguments_say_what_is_right(self):
        done = subprocess.run([PROGRAM, "train", "fashion-mnist", "--batch", "100000", "-n", "1"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("a batch of 100000 is larger than the 60000 training pictures", done.stderr)


if __name__ == "__main__":
    unittest.main()
