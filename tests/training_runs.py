"""Runs of `chorale train` for tests: started in a folder of their own, and what they left is looked at."""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import unittest_main  # noqa: F401: forgets the variables of a launcher, with which a run would wait for other ranks

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve() / "chorale"
LIMIT_S = 120


class Train(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def start(self, *args, task="fashion-mnist", **kwargs):
        return subprocess.Popen([PROGRAM, "train", task, *args], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)

    def run_to_end(self, *args, status=0, **kwargs):
        run = self.start(*args, **kwargs)
        try:
            out, err = run.communicate(timeout=LIMIT_S)
        finally:
            run.kill()
        self.assertEqual(run.returncode, status, out + err)
        return out if status == 0 else out + err

    def accuracy(self, *args):
        return float(re.search(r"test accuracy ([0-9.]+) % after [0-9]+ steps", self.run_to_end("--batch", "64", *args))[1])

    def steps_of(self, run):
        return sorted(int(path.name[5:]) for path in (self.folder / run / "checkpoints").glob("step-*"))

    def last_checkpoint(self, run):
        return self.folder / run / "checkpoints" / f"step-{self.steps_of(run)[-1]:08}"

    def weights(self, run):
        """Every part of the last checkpoint's tensors, with the checksum of its bytes; which rank wrote it is no matter."""
        index = json.loads((self.last_checkpoint(run) / "index.json").read_text())
        return {key: (tensor["dtype"], tensor["shape"], [(part["offsets"], part["crc32c"]) for part in tensor["chunks"]]) for key, tensor in index["tensors"].items()}


class TextRuns(Train):
    """Small models that learn a small text."""
    TINY = ("--context", "32", "--layers", "1", "--heads", "2", "--width", "16", "--batch", "8", "--log-every", "5")

    def setUp(self):
        super().setUp()
        (self.folder / "text").write_text("the cat sat on the mat. " * 400)

    def metrics(self, run):
        return [json.loads(line) for line in (self.folder / run / "metrics.jsonl").read_text().splitlines()]

    def losses(self, run):
        return [line["loss"] for line in self.metrics(run) if line["kind"] == "train"]

    def assert_close(self, found, wanted):
        self.assertEqual(len(found), len(wanted))
        for a, b in zip(found, wanted):
            self.assertAlmostEqual(a, b, delta=2e-4 * b)

    def generate(self, *args):
        done = subprocess.run([PROGRAM, "generate", *args], cwd=self.folder, capture_output=True, text=True, timeout=LIMIT_S)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout
