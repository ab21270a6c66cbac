"""Training jobs through the program: they learn, and whatever interrupts them, they go on where they were.

  train_test.py BIN_FOLDER

CHORALE_TEST_KILLS=50 kills a run that often instead of 5 times.
"""
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from unittest_main import main

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve() / "chorale"
KILLS = int(os.environ.get("CHORALE_TEST_KILLS") or 5)
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


class Learning(Train):
    def test_fashion_mnist_is_learnt(self):
        self.assertGreater(self.accuracy("--model", "mlp", "--steps", "150", "-n", "1"), 80)

    def test_two_ranks_learn_it_together(self):
        self.assertGreater(self.accuracy("--steps", "40", "-n", "2", "--precision", "bf16", "--compress", "powersgd"), 60)

    def test_a_run_says_what_it_did(self):
        self.run_to_end("--model", "mlp", "--steps", "20", "-n", "2", "--clip", "1")
        run = self.folder / "runs" / "fashion-mnist-1"
        options = json.loads((run / "config.json").read_text())
        self.assertEqual((options["model"], options["steps"], options["ranks"]), ("mlp", 20, 2))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        self.assertEqual([(line["kind"], line["step"]) for line in lines],
                         [("start", 0), ("train", 10), ("train", 20), ("time", 20), ("time", 20), ("evaluation", 20)])
        self.assertLess(lines[2]["loss"], lines[1]["loss"])
        self.assertLessEqual({"version", "processor", "vectors", "cores", "memory_gib", "system", "oneDNN", "compiler"}, lines[0].keys())
        self.assertLessEqual({"accuracy", "gradient_norm", "lr", "pictures_per_second", "exposed_communication_ms"}, lines[1].keys())
        self.assertEqual([line["rank"] for line in lines[3:5]], [0, 1])
        self.assertEqual(len(list(run.glob("events.out.tfevents.*"))), 1)
        self.assertTrue((run / "report.html").exists())
        evaluation = json.loads((run / "evaluation.json").read_text())
        self.assertEqual([sum(row) for row in evaluation["confusion"]], [1000] * 10)
        right = sum(evaluation["confusion"][i][i] for i in range(10))
        self.assertAlmostEqual(right / 10000, lines[5]["test_accuracy"])
        sureness = [mistake["probability"] for mistake in evaluation["worst"]]
        self.assertEqual((len(sureness), sureness), (24, sorted(sureness, reverse=True)))


class OtherLaunchers(Train):
    LINE = (PROGRAM, "train", "fashion-mnist", "--model", "mlp", "--steps", "4", "--batch", "32", "--out", "a")

    def test_mpirun_starts_the_ranks(self):
        self.assertIsNotNone(shutil.which("mpirun"), "no mpirun: run tools/setup test")
        done = subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *self.LINE], cwd=self.folder, capture_output=True,
                              text=True, timeout=LIMIT_S)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("ranks: 2,", done.stdout)
        self.assertEqual(self.steps_of("a"), [4])

    def test_srun_starts_the_ranks(self):
        # What srun sets, on a machine without it.
        step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost"}
        ranks = [subprocess.Popen(self.LINE, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  env={**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}) for rank in (0, 1)]
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0, 0], said)
        self.assertIn("ranks: 2,", said[0])
        self.assertEqual(said[1], "")
        self.assertEqual(self.steps_of("a"), [4])


class Stopping(Train):
    # Small and quick, with a checkpoint every other step.
    OPTIONS = ("--model", "mlp", "--steps", "40", "--batch", "32", "--checkpoint-every", "2", "--keep", "2", "--log-every", "1", "-n", "2")

    def wait_until(self, condition, process):
        until = time.monotonic() + LIMIT_S
        while not condition():
            self.assertIsNone(process.poll(), "it ended")
            self.assertLess(time.monotonic(), until)
            time.sleep(0.01)

    def expect_the_same_bits_after_kills(self, kills_wanted, options, task):
        begin = time.monotonic()
        self.run_to_end(*options, "--out", "whole", task=task)
        whole_s = time.monotonic() - begin
        numbers = random.Random(time.time())
        (self.folder / "killed").mkdir()
        kills = 0
        while kills < kills_wanted:
            run = self.start(*options, "--out", "killed", "--resume", task=task)
            delay = numbers.uniform(0.1, 1) * whole_s
            try:
                run.wait(delay)
            except subprocess.TimeoutExpired:
                run.kill()
                kills += 1
            out, err = run.communicate(timeout=LIMIT_S)
            self.assertIn(run.returncode, (0, -signal.SIGKILL), err)
            if run.returncode == 0 and kills < kills_wanted:  # it came to its end: once more from the beginning
                self.assertEqual(self.weights("killed"), self.weights("whole"))
                shutil.rmtree(self.folder / "killed")
                (self.folder / "killed").mkdir()
        self.run_to_end(*options, "--out", "killed", "--resume", task=task)
        self.assertEqual(self.weights("killed"), self.weights("whole"))

    def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(self):
        self.expect_the_same_bits_after_kills(KILLS, self.OPTIONS, "fashion-mnist")

    def test_a_sharded_run_that_is_killed_again_and_again_ends_with_the_same_bits(self):
        (self.folder / "text").write_text("the cat sat on the mat. " * 400)
        options = ("--text", "text", "--tokenizer", "bytes", "--context", "16", "--layers", "1", "--heads", "2", "--width", "16", "--batch", "8", "--steps", "40",
                   "--sample-tokens", "4", "--checkpoint-every", "2", "--keep", "2", "--log-every", "1", "-n", "2", "--fsdp")
        self.expect_the_same_bits_after_kills(KILLS if os.environ.get("CHORALE_TEST_KILLS") else 2, options, "gpt")

    def test_an_interrupt_saves_and_says_how_to_go_on(self):
        for ranks in "1", "2":
            with self.subTest(ranks=ranks):
                name = "run" + ranks
                run = self.start("--model", "mlp", "--log-every", "1", "-n", ranks, "--out", name)
                self.wait_until(lambda: (self.folder / name / "metrics.jsonl").exists(), run)
                run.send_signal(signal.SIGINT)
                out, err = run.communicate(timeout=LIMIT_S)
                self.assertEqual(run.returncode, 130, err)
                step = int(re.search(r"interrupted after step ([0-9,]+) of", out)[1].replace(",", ""))
                self.assertIn(f"chorale train fashion-mnist --out {name} --resume", out)
                self.assertEqual(self.steps_of(name)[-1], step)
                other_ranks = "2" if ranks == "1" else "1"
                self.run_to_end("--out", name, "--resume", "-n", other_ranks, "--steps", str(step + 5))
                self.assertEqual(self.steps_of(name)[-1], step + 5)

    def test_a_second_interrupt_ends_it_at_once(self):
        for ranks, status in ("1", -signal.SIGINT), ("2", 128 + signal.SIGINT):
            with self.subTest(ranks=ranks):
                # A step of many seconds, which only the first interrupt would wait for.
                run = self.start("--model", "resnet18", "--batch", "8000", "--accumulate", "100", "-n", ranks, "--out", "run" + ranks)
                self.wait_until(lambda: (self.folder / ("run" + ranks) / "metrics.jsonl").exists(), run)
                time.sleep(0.2)
                run.send_signal(signal.SIGINT)
                time.sleep(0.3)
                self.assertIsNone(run.poll(), "the first one waits for the step")
                run.send_signal(signal.SIGINT)
                run.communicate(timeout=LIMIT_S)
                self.assertEqual(run.returncode, status)
                self.assertEqual(self.steps_of("run" + ranks), [])

    def test_a_failed_rank_is_named_and_a_restart_goes_on(self):
        run = self.start(*self.OPTIONS, "--out", "a", "--max-restarts", "1")
        self.wait_until(lambda: self.steps_of("a"), run)
        children = pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        ranks = [pid for pid in children if b"RANK=1\0" in pathlib.Path(f"/proc/{pid}/environ").read_bytes()]
        os.kill(int(ranks[0]), signal.SIGKILL)
        out, err = run.communicate(timeout=LIMIT_S)
        self.assertEqual(run.returncode, 0, err)
        self.assertRegex(err, r"rank 1 .*killed by SIGKILL")
        self.assertIn("going on behind step", out)
        self.assertEqual(self.steps_of("a")[-1], 40)

    def test_a_damaged_checkpoint_is_named_and_the_one_before_used_when_asked(self):
        self.run_to_end("--model", "mlp", "--steps", "4", "--checkpoint-every", "2", "-n", "2", "--out", "a")
        damaged = next(self.last_checkpoint("a").glob("rank-1-*.safetensors"))
        content = bytearray(damaged.read_bytes())
        content[-7] ^= 1
        damaged.write_bytes(content)
        words = self.run_to_end("--out", "a", "--resume", status=1)
        self.assertIn(f"{damaged.relative_to(self.folder)} is damaged", words)
        self.assertIn("--resume-previous", words)
        self.assertEqual(words.count("is damaged"), 2, "rank 0 says it, and the launcher repeats it")
        self.run_to_end("--out", "a", "--resume-previous", "--steps", "6")
        self.assertEqual(self.steps_of("a")[-1], 6)


class Checkpoints(Train):
    """What is in a folder, and what another number of ranks makes of it."""
    OPTIONS = ("--model", "mlp", "--batch", "24", "--log-every", "1", "--schedule", "constant")

    def losses(self, run):
        lines = [json.loads(line) for line in (self.folder / run / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if line["kind"] == "train"]

    def checkpoint(self, *args, status=0):
        done = subprocess.run([PROGRAM, "checkpoint", *args], cwd=self.folder, capture_output=True, text=True, timeout=LIMIT_S)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def test_another_number_of_ranks_goes_on_with_the_same_losses(self):
        self.run_to_end(*self.OPTIONS, "-n", "2", "--steps", "4", "--out", "a")
        for ranks in "1", "3":
            shutil.copytree(self.folder / "a", self.folder / ranks)
            self.run_to_end("--out", ranks, "--resume", "-n", ranks, "--steps", "10")
            self.run_to_end(*self.OPTIONS, "-n", ranks, "--steps", "10", "--out", "whole" + ranks)
            found, wanted = self.losses(ranks), self.losses("whole" + ranks)
            self.assertEqual(len(found), 10)
            for a, b in zip(found, wanted):
                self.assertAlmostEqual(a, b, delta=1e-5 * b)

    def test_ranks_share_the_writing_and_commands_look_at_it(self):
        self.run_to_end(*self.OPTIONS, "-n", "2", "--steps", "2", "--out", "a")
        folder = self.last_checkpoint("a")
        files = sorted(path.name.split("-")[1] for path in folder.glob("rank-*.safetensors"))
        self.assertEqual(files, ["0", "1"])
        shown = self.checkpoint("show", "a")
        self.assertIn(f"{folder.relative_to(self.folder)}: ", shown)
        self.assertRegex(shown, r"optimizer/state/\S+/exp_avg +f32 +\[")
        self.assertIn("all is well", self.checkpoint("verify", "a"))
        self.checkpoint("merge", "a", "merged")
        self.assertEqual(len(list((self.folder / "merged").glob("*.safetensors"))), 1)
        names = [line.split()[0] for line in self.checkpoint("show", "merged").splitlines()[1:]]
        self.assertEqual(names, [line.split()[0] for line in shown.splitlines()[1:]])
        self.assertIn("is there already", self.checkpoint("merge", "a", "merged", status=1))
        self.checkpoint("convert", "a", "plain")
        self.assertEqual([path.name for path in (self.folder / "plain").iterdir()], ["model.safetensors"])
        self.checkpoint("convert", "plain", "back")
        self.assertIn("all is well", self.checkpoint("verify", "back"))
        # The bytes come back: the same checksums of the same tensors.
        index, back = (json.loads((path / "index.json").read_text())["tensors"] for path in (folder, self.folder / "back"))
        self.assertEqual(set(back), {key for key in index if "/" not in key})
        for key, tensor in back.items():
            self.assertEqual(tensor["chunks"][0]["crc32c"], index[key]["chunks"][0]["crc32c"], key)
        damaged = next(folder.glob("rank-1-*.safetensors"))
        content = bytearray(damaged.read_bytes())
        content[-5] ^= 1
        damaged.write_bytes(content)
        self.assertIn(f"{damaged.relative_to(self.folder)} is damaged: the checksum of ", self.checkpoint("verify", "a", status=1))
        self.assertIn("is damaged", self.checkpoint("merge", "a", "never", status=1))
        self.assertFalse((self.folder / "never").exists())


class Options(Train):
    def test_a_file_of_options_and_the_command_line_which_wins(self):
        (self.folder / "o.json").write_text('{"model": "mlp", "steps": 7, "ranks": 1, "batch": 50}')
        self.run_to_end("--config", "o.json", "--steps", "3", "--out", "a")
        options = json.loads((self.folder / "a" / "config.json").read_text())
        self.assertEqual((options["model"], options["steps"], options["batch"]), ("mlp", 3, 50))

    def test_wrong_options_say_what_is_right(self):
        (self.folder / "o.json").write_text('{"bacth": 1}')
        self.run_to_end("--model", "mlp", "--steps", "1", "-n", "1", "--out", "a")
        for args, status, words in (
            (["--batch", "100000", "-n", "1"], 1, "a batch of 100000 is larger than the 60000 training examples"),
            (["--batch", "100", "-n", "3"], 1, "choose a multiple of 3"),
            (["--config", "o.json"], 1, "o.json: there is no option 'bacth'; did you mean 'batch'?"),
            (["--optimizer", "adamm"], 2, "did you mean 'adamw'?"),
            (["--out", "a"], 1, "there is a run in a already"),
            (["--out", "a", "--resume", "--batch", "64"], 1, "--batch was 128, not 64"),
            (["--out", "none", "--resume"], 1, "there is no run in none"),
        ):
            with self.subTest(args=args):
                self.assertIn(words, self.run_to_end(*args, status=status))

    def test_a_dry_run_shows_the_plan_and_leaves_nothing(self):
        out = self.run_to_end("--dry-run", "-n", "2", "--compress", "bf16")
        for words in "421,834 in 12 tensors", "2,340 of 128 pictures", "MiB at the peak", "1687336 bytes", "Conv2d(1, 32":
            self.assertIn(words, out)
        # Without -n there are as many ranks as cores, or fewer where the batch cannot be dealt to them.
        self.assertIn("ranks        1, each with 127 examples", self.run_to_end("--dry-run", "--batch", "127"))
        self.assertEqual(list(self.folder.iterdir()), [])


class Text(Train):
    TINY = ("--context", "32", "--layers", "1", "--heads", "2", "--width", "16", "--batch", "8", "--log-every", "5")

    def setUp(self):
        super().setUp()
        (self.folder / "text").write_text("the cat sat on the mat. " * 400)

    def metrics(self, run):
        return [json.loads(line) for line in (self.folder / run / "metrics.jsonl").read_text().splitlines()]

    def generate(self, *args):
        done = subprocess.run([PROGRAM, "generate", *args], cwd=self.folder, capture_output=True, text=True, timeout=LIMIT_S)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_a_gpt_learns_a_text_goes_on_after_an_interrupt_and_writes(self):
        options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--lr", "0.01", "--epochs", "6", "--evaluate-every", "60", "--sample-tokens", "40")
        self.run_to_end(*options, "-n", "2", "--out", "a", "--checkpoint-every", "100", task="gpt")
        lines = self.metrics("a")
        losses = [line["loss"] for line in lines if line["kind"] == "train"]
        self.assertLess(losses[-1], losses[0] / 3)
        last = [line for line in lines if line["kind"] == "evaluation"][-1]
        self.assertAlmostEqual(last["test_bits_per_byte"], last["test_loss"] / 0.693147, delta=1e-3)
        self.assertEqual(len([line for line in lines if line["kind"] == "sample"]), 4)
        first = self.generate("--run", "a", "--prompt", "the cat", "--tokens", "60", "--seed", "5")
        self.assertTrue(first.startswith("the cat"))
        self.assertEqual(first, self.generate("--run", "a", "--prompt", "the cat", "--tokens", "60", "--seed", "5"))
        self.assertIn(" sat on the mat. the cat sat", self.generate("--run", "a", "--prompt", "the cat", "--tokens", "40", "--temperature", "0"))

        self.run_to_end(*options, "-n", "2", "--out", "b", "--steps", "30", task="gpt")
        self.run_to_end("--out", "b", "--resume", "--steps", "60", task="gpt")
        (self.folder / "text").write_text("another text. " * 400)
        self.assertIn("learnt from other data", self.run_to_end("--out", "b", "--resume", "--steps", "90", task="gpt", status=1))

    def losses(self, run):
        return [line["loss"] for line in self.metrics(run) if line["kind"] == "train"]

    def assert_close(self, found, wanted):
        self.assertEqual(len(found), len(wanted))
        for a, b in zip(found, wanted):
            self.assertAlmostEqual(a, b, delta=2e-4 * b)

    def test_ranks_that_share_a_model_train_as_one_does_and_any_split_goes_on(self):
        for task, extra in (("gpt", ("--sample-tokens", "10")), ("bert", ())):
            with self.subTest(task):
                options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--dropout", "0.1", "--lr", "0.01", "--clip", "0.5", "--schedule", "constant", "--warmup", "0",
                           "--epochs", "50", "--log-every", "1", *extra)
                self.run_to_end(*options, "-n", "1", "--out", f"{task}-one", "--steps", "12", task=task)
                wanted = self.losses(f"{task}-one")
                self.assertLess(wanted[-1], wanted[0])
                # Split from the beginning, with the bits of one rank's dropout; then whole again, and split otherwise.
                run = f"{task}-split"
                sequences = ("--sequence-parallel",) if task == "bert" else ()
                out = self.run_to_end(*options, "-n", "2", "--tp", "2", *sequences, "--out", run, "--steps", "4", task=task)
                self.assertIn("ranks: 2 (1 x 2)", out)
                self.run_to_end("--out", run, "--resume", "--steps", "8", "-n", "1", "--tp", "1", task=task)
                self.run_to_end("--out", run, "--resume", "--steps", "12", "-n", "2", "--tp", "2", "--sequence-parallel", task=task)
                self.assert_close(self.losses(run), wanted)
                tests = [[line["test_loss"] for line in self.metrics(r) if line["kind"] == "evaluation"][-1] for r in (f"{task}-one", run)]
                self.assert_close(tests[1:], tests[:1])
        self.assertTrue(self.generate("--run", "gpt-split", "--prompt", "the", "--tokens", "5").startswith("the"))

    def test_replicas_of_split_models_train_as_replicas_do(self):
        options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--lr", "0.01", "--epochs", "50", "--log-every", "1", "--steps", "6")
        self.run_to_end(*options, "-n", "2", "--out", "replicas", task="gpt")
        self.run_to_end(*options, "--dp", "2", "--tp", "2", "--out", "both", task="gpt")
        self.assert_close(self.losses("both"), self.losses("replicas"))

    def memory_of(self, out):
        """What a job said of its ranks' memory before the first step, in bytes."""
        said = re.search(r"memory of a rank: (\S+) MiB at the peak of a step; parameters (\S+) MiB, gradients (\S+) MiB, states (\S+) MiB, "
                         r"activations (\S+) MiB, largest gathered block (\S+) MiB\n(?s:.*) 1/", out)
        return [float(number) * 2**20 for number in said.groups()]

    def assert_within_a_tenth(self, found, wanted):
        self.assertLess(abs(found - wanted), 0.1 * wanted, f"{found} is not {wanted}")

    def test_fully_sharded_ranks_train_as_replicas_do_and_any_layout_goes_on(self):
        # A block of width w has 12 w^2 + 13 w numbers; what is left are the tables and the last norm, and of BERT the head.
        layers, width, context = 3, 48, 32
        block = 12 * width**2 + 13 * width
        rest = {"gpt": (256 + context) * width + 2 * width, "bert": (260 + context + 2) * width + 2 * width + width**2 + 3 * width + 260}
        for task, extra in (("gpt", ("--sample-tokens", "10")), ("bert", ())):
            with self.subTest(task):
                options = ("--text", "text", "--tokenizer", "bytes", "--context", str(context), "--layers", str(layers), "--heads", "2", "--width", str(width), "--batch", "8",
                           "--log-every", "1", "--dropout", "0.1", "--lr", "0.01", "--clip", "0.5", "--schedule", "constant", "--warmup", "0", "--epochs", "50", *extra)
                self.run_to_end(*options, "-n", "2", "--out", f"{task}-whole", "--steps", "12", task=task)
                wanted = self.losses(f"{task}-whole")
                self.assertLess(wanted[-1], wanted[0])
                run = f"{task}-sharded"
                out = self.run_to_end(*options, "-n", "2", "--fsdp", "--offload", "--out", run, "--steps", "4", task=task)
                self.assertIn("ranks: 2 (1 x 2 that share a model)", out)
                peak, parameters, gradients, states, activations, largest = self.memory_of(out)
                numbers = layers * block + rest[task]
                self.assert_within_a_tenth(parameters, numbers * 4 / 2)
                self.assert_within_a_tenth(gradients, numbers * 4 / 2)
                self.assert_within_a_tenth(states, numbers * 4)
                self.assert_within_a_tenth(largest, 4 * max(block, rest[task]))
                for line in self.metrics(run):
                    if line["kind"] == "time":
                        self.assert_within_a_tenth(peak, line["memory_mib"] * 2**20)
                # All of it but activations is known; half of the parameters would have been twice as much.
                self.assertGreater(peak, activations + parameters + states)
                self.assertLess(peak, activations + parameters + gradients + states + 4 * largest + 2**20)
                # Whole again, and then replicas of shards: the ranks that see the data stay as many.
                self.run_to_end("--out", run, "--resume", "--steps", "8", "-n", "2", task=task)
                self.assert_close(self.losses(run), wanted[:8])
                self.run_to_end("--out", run, "--resume", "--steps", "12", "-n", "2", "--fsdp", "--hybrid", "1x2", task=task)
                self.assert_close(self.losses(run), wanted)
                tests = [[line["test_loss"] for line in self.metrics(r) if line["kind"] == "evaluation"][-1] for r in (f"{task}-whole", run)]
                self.assert_close(tests[1:], tests[:1])
        self.assertTrue(self.generate("--run", "gpt-sharded", "--prompt", "the", "--tokens", "5").startswith("the"))

    def test_replicas_of_shards_and_pieces_of_batches_train_as_replicas_do(self):
        options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--lr", "0.01", "--epochs", "50", "--log-every", "1", "--steps", "5", "--accumulate", "2")
        self.run_to_end(*options, "-n", "4", "--out", "whole", task="gpt")
        out = self.run_to_end(*options, "--hybrid", "2x2", "--fsdp", "--out", "both", task="gpt")
        self.assertIn("ranks: 4 (2 x 2 that share a model)", out)
        self.assert_close(self.losses("both"), self.losses("whole"))
        self.assertEqual({(tuple(part[0]), name) for name, (_, _, parts) in self.weights("both").items() for part in parts if name.endswith("wte.weight")},
                         {((0, 0), "transformer.wte.weight"), ((128, 0), "transformer.wte.weight")})

    def test_layers_that_are_split_and_shared_out_train_as_one_rank_does(self):
        options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--lr", "0.01", "--clip", "0.5", "--epochs", "50", "--log-every", "1", "--schedule", "constant", "--warmup", "0")
        for task, extra in (("gpt", ("--sample-tokens", "4")), ("bert", ())):
            with self.subTest(task):
                self.run_to_end(*options, *extra, "-n", "2", "--out", f"{task}-two", "--steps", "8", task=task)
                wanted = self.losses(f"{task}-two")
                run = f"{task}-both"
                out = self.run_to_end(*options, *extra, "-n", "4", "--tp", "2", "--fsdp", "--out", run, "--steps", "4", task=task)
                self.assertIn("ranks: 4 (2 x 2)", out)
                self.run_to_end("--out", run, "--resume", "--steps", "6", "-n", "2", "--tp", "1", "--fsdp", task=task)
                self.run_to_end("--out", run, "--resume", "--steps", "8", "-n", "4", "--tp", "2", "--fsdp", task=task)
                self.assert_close(self.losses(run), wanted)

    def test_a_dry_run_of_sharded_ranks_says_what_one_of_them_has(self):
        options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--batch", "8", "--dry-run", "--out", "x")
        numbers = {}
        for extra in (("-n", "1"), ("-n", "2", "--fsdp"), ("--hybrid", "2x2", "--fsdp"), ("-n", "4", "--fsdp")):
            out = self.run_to_end(*options, *extra, task="gpt")
            numbers[extra] = [float(n) for n in re.search(r"weights ([\d.]+) MiB, gradients ([\d.]+) MiB, optimizer ([\d.]+) MiB", out).groups()]
            self.assertFalse((self.folder / "x").exists())
        whole = numbers["-n", "1"]
        for extra, ranks in ((("-n", "2", "--fsdp"), 2), (("--hybrid", "2x2", "--fsdp"), 2), (("-n", "4", "--fsdp"), 4)):
            for found, wanted in zip(numbers[extra], whole):
                self.assertLess(abs(found - wanted / ranks), 0.06, f"{extra}: {numbers[extra]} of {whole}")

    def test_a_sharded_model_starts_from_weights_of_another_run(self):
        options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--lr", "0.01", "--epochs", "50", "--log-every", "1")
        for task in ("gpt", "bert"):
            with self.subTest(task):
                self.run_to_end(*options, "-n", "1", "--out", f"{task}-first", "--steps", "3", task=task)
                first = next((self.folder / f"{task}-first" / "checkpoints").glob("step-*"))
                self.run_to_end(*options, "-n", "2", "--init", str(first), "--out", f"{task}-plain", "--steps", "3", task=task)
                self.run_to_end(*options, "-n", "2", "--init", str(first), "--fsdp", "--out", f"{task}-parts", "--steps", "3", task=task)
                self.assert_close(self.losses(f"{task}-parts"), self.losses(f"{task}-plain"))

    def test_a_disk_that_fails_while_a_sharded_run_saves_leaves_the_last_checkpoint(self):
        """A full one, and one that becomes read-only: the error names file and rank, and the run goes on when it is mended."""
        if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
            self.skipTest("mount namespaces cannot be made here")
        options = " ".join(("--text text --tokenizer bytes", *self.TINY, "--epochs 5000 --checkpoint-every 5 --keep 2 --sample-tokens 0 -n 2 --fsdp --out run"))
        for how, broken, mended, why in (("full", "dd if=/dev/zero of=fill bs=4k", "rm fill", "No space left on device"),
                                         ("read-only", "mount --bind run/checkpoints run/checkpoints; mount -o remount,ro,bind run/checkpoints", "umount run/checkpoints", "Read-only file system")):
            with self.subTest(how):
                (self.folder / how).mkdir()
                script = f"""
                    mount -t tmpfs -o size=8m none {how} && cp text {how} && cd {how} || exit 9
                    {PROGRAM} train gpt {options} --steps 100000 >../out-{how} 2>../err-{how} & job=$!
                    for i in $(seq 1200); do [ -e run/checkpoints/step-00000010/index.json ] && break; sleep 0.05; done
                    {{ {broken}; }} 2>/dev/null
                    wait $job; echo "ended with $?"
                    {{ {mended}; }} || exit 8
                    for last in run/checkpoints/step-*; do {PROGRAM} checkpoint verify $last || exit 7; done
                    step=$((10#${{last##*-}}))
                    {PROGRAM} train gpt --out run --resume --fsdp --steps $((step + 5)) || exit 6
                """
                done = subprocess.run(["unshare", "-m", "bash", "-c", script], cwd=self.folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
                error = (self.folder / f"err-{how}").read_text()
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr + error)
                self.assertIn("ended with 1", done.stdout, error)
                self.assertIn(why, error)
                self.assertRegex(error, r"ranks? \d")
                self.assertRegex(error, r"run/checkpoints/\S*")
                self.assertIn("going on behind step", done.stdout)

    def test_sharding_that_cannot_be_says_why(self):
        options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--steps", "1", "--out", "x", "-n", "2")
        for extra, why in ((("--fsdp", "--hybrid", "2x2"), "--hybrid 2x2 are 4 ranks, but the job has 2"),
                           (("--fsdp", "--hybrid", "two"), "--hybrid is replicas by ranks that share one, such as 2x4, not 'two'"),
                           (("--hybrid", "1x2"), "give --fsdp with it"),
                           (("--offload",), "give --fsdp with it"),
                           (("--fsdp", "--tp", "2", "--hybrid", "1x1"), "ranks with the same part of a layer share that"),
                           (("--fsdp", "--compress", "bf16"), "leave it out with --fsdp"),
                           (("--fsdp", "--compile"), "leave it out with --fsdp")):
            with self.subTest(extra):
                self.assertIn(why, self.run_to_end(*options, *extra, task="gpt", status=1))
                shutil.rmtree(self.folder / "x", ignore_errors=True)

    def test_ranks_that_share_a_model_scale_the_loss_alike(self):
        options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--lr", "0.01", "--epochs", "50", "--log-every", "1", "--steps", "12", "--precision", "f16")
        self.run_to_end(*options, "-n", "1", "--out", "f16-one", task="gpt")
        self.run_to_end(*options, "-n", "2", "--tp", "2", "--out", "f16-two", task="gpt")
        one, two = self.losses("f16-one"), self.losses("f16-two")
        self.assertEqual(len(one), len(two))
        for a, b in zip(one, two):
            self.assertAlmostEqual(a, b, delta=0.02 * a)

    def test_ranks_that_share_a_model_may_compress_gradients_and_any_split_goes_on(self):
        options = ("--text", "text", "--tokenizer", "bytes", "--context", "32", "--layers", "1", "--heads", "2", "--width", "64", "--batch", "8", "--lr", "0.01",
                   "--epochs", "50", "--log-every", "1", "--compress", "powersgd")
        self.run_to_end(*options, "--dp", "2", "--tp", "2", "--out", "a", "--steps", "12", task="gpt")
        losses = self.losses("a")
        self.assertLess(losses[-1], losses[0] * 0.9)
        # With the same ranks the same bits; with others only what does not depend on how matrices were cut.
        self.run_to_end(*options, "--dp", "2", "--tp", "2", "--out", "b", "--steps", "12", "--checkpoint-every", "6", task="gpt")
        shutil.rmtree(self.folder / "b/checkpoints/step-00000012")
        self.run_to_end("--out", "b", "--resume", "--steps", "12", task="gpt")
        self.assertEqual(self.weights("b"), self.weights("a"))
        self.assertTrue("rank-3-tp-2/matrix/4/error" in self.weights("a"))
        for split in (("--dp", "2", "--tp", "1"), ("--dp", "4", "--tp", "1"), ("--dp", "1", "--tp", "2")):
            with self.subTest(split):
                shutil.copytree(self.folder / "a", self.folder / "other")
                self.run_to_end("--out", "other", "--resume", "--steps", "16", *split, task="gpt")
                self.assertLess(self.losses("other")[-1], losses[0] * 0.9)
                shutil.rmtree(self.folder / "other")

    def test_a_dry_run_of_ranks_that_share_a_model_measures_a_part_of_it(self):
        options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--dry-run")
        whole = self.run_to_end(*options, "-n", "1", task="gpt")
        out = self.run_to_end(*options, "--dp", "3", "--tp", "2", "--batch", "9", task="gpt")
        self.assertEqual(out.count("memory "), 1)
        self.assertIn("ranks        6 (3 x 2), each with 3 examples", out)
        figures = {"whole": whole, "split": out}
        words = {key: re.search(r"parameters   ([\d,]+) in (\d+) tensors", text).groups() for key, text in figures.items()}
        self.assertEqual(words["split"], words["whole"])
        count = int(words["whole"][0].replace(",", ""))
        part = int(re.search(r"of which a rank has ([\d,]+)", out).group(1).replace(",", ""))
        self.assertTrue(count / 2 < part < count * 0.7, (part, count))
        checkpoints = [re.search(r"checkpoint   (\S+) MiB", text).group(1) for text in (whole, out)]
        self.assertEqual(*checkpoints)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["text"])

    def test_a_split_that_cannot_be_says_why(self):
        options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--steps", "1")
        for extra, why in ((("-n", "3", "--tp", "2"), "--tp 2 does not divide the 3 ranks"),
                           (("-n", "2", "--dp", "2", "--tp", "2"), "--dp 2 and --tp 2 are 4 ranks, but the job has 2"),
                           (("-n", "3", "--tp", "3"), "--tp 3 cannot share 2 heads"),
                           (("-n", "1", "--sequence-parallel"), "choose --tp 2 or more"),
                           (("-n", "3", "--tp", "2", "--dry-run"), "--tp 2 does not divide the 3 ranks")):
            with self.subTest(extra):
                self.assertIn(why, self.run_to_end(*options, *extra, "--out", "x", task="gpt", status=1))
                shutil.rmtree(self.folder / "x", ignore_errors=True)

    def test_a_bert_learns_to_fill_gaps_from_a_model_in_the_common_form(self):
        shape = {"model_type": "bert", "vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                 "intermediate_size": 64, "max_position_embeddings": 32, "hidden_dropout_prob": 0.1}
        (self.folder / "shape.json").write_text(json.dumps(shape))
        options = ("--text", "text", "--vocab", "300", "--context", "16", "--batch", "8", "--lr", "0.01", "-n", "1", "--log-every", "5")
        self.run_to_end(*options, "--model-config", "shape.json", "--out", "a", "--steps", "60", "--epochs", "50", task="bert")
        losses = [line["loss"] for line in self.metrics("a") if line["kind"] == "train"]
        self.assertLess(losses[-1], losses[0] * 0.6)
        self.assertIn("Embedding(400, 32", self.run_to_end(*options, "--config", "shape.json", "--dry-run", task="bert"))
        (self.folder / "shape.json").unlink()
        self.run_to_end("--out", "a", "--resume", "--steps", "62", task="bert")  # the run knows the shape
        self.run_to_end(*options, "--init", self.last_checkpoint("a"), "--out", "b", "--steps", "5", task="bert")
        self.assertLess(self.metrics("b")[1]["loss"], losses[0] * 0.8)

    def test_a_bert_starts_from_a_model_with_its_tokenizer_and_hands_it_on(self):
        tokenizer = self.folder / "tokenizer"
        tokenizer.mkdir()
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "the", "cat", "mat", "s", "##at", "on"]
        (tokenizer / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
        options = ("--text", "text", "--batch", "8", "-n", "1", "--lr", "0.01", "--epochs", "20", "--log-every", "5")
        self.run_to_end(*options, *self.TINY[:-4], "--tokenizer", tokenizer, "--out", "a", "--steps", "60", task="bert")
        shutil.rmtree(tokenizer)
        model = self.last_checkpoint("a")
        self.assertEqual((model / "vocab.txt").read_text().split(), vocabulary)
        out = self.run_to_end(*options, "--context", "32", "--init", model, "--out", "b", "--steps", "5", task="bert")
        self.assertIn("3,200 tokens (12 word pieces)", out)
        first, second = ([line for line in self.metrics(run) if line["kind"] == "train"] for run in "ab")
        self.assertLess(second[0]["loss"], first[0]["loss"] * 0.7)
        samples = [line["text"] for line in self.metrics("a") if line["kind"] == "sample"]
        self.assertRegex(samples[-1], r"\[(the|cat|mat|s|at|on|\.)(: \S+)?\]")


if __name__ == "__main__":
    main()
