"""The job of the README's first command, in a short form: 150 steps must teach it most of Fashion-MNIST.

  train_test.py BIN_FOLDER
"""
import pathlib
import re
import signal
import subprocess
import sys
import unittest

PROGRAM = pathlib.Path(sys.argv.pop(1)) / "chorale"


class Train(unittest.TestCase):
    def test_fashion_mnist_is_learnt(self):
        done = subprocess.run([PROGRAM, "train", "fashion-mnist", "--steps", "150", "--batch", "64", "--threads", "1"],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertGreater(float(re.search(r"test accuracy ([0-9.]+) % after 150 steps", done.stdout)[1]), 80)

    def test_an_interrupt_ends_it_after_the_step(self):
        run = subprocess.Popen([PROGRAM, "train", "fashion-mnist", "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
        run.stdout.readline(), run.stdout.readline(), run.stdout.readline()  # the first step is done
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
        self.assertIn("interrupted after step", out)
        self.assertIn("stopped by a signal", err)
        self.assertEqual(run.returncode, 1)

    def test_wrong_arguments_say_what_is_right(self):
        done = subprocess.run([PROGRAM, "train", "fashion-mnist", "--batch", "100000"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("a batch of 100000 is larger than the 60000 training pictures", done.stderr)


if __name__ == "__main__":
    unittest.main()
