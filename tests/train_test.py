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
import time

from processes import has_taken
from training_runs import LIMIT_S, PROGRAM, TextRuns, Train
from unittest_main import main

KILLS = int(os.environ.get("CHORALE_TEST_KILLS") or 5)


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
        # What 0 and auto came to; options with other values were used as they are.
        self.assertEqual(lines[0]["used"], {"evaluate-every": lines[0]["steps_per_epoch"], "device": lines[0]["device"],
                                            "warmup": "none but the cycle's own"})
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
                run.send_signal(signal.SIGINT)
                self.wait_until(lambda: has_taken(run.pid, signal.SIGINT), run)
                time.sleep(0.1)  # time to end at once, which would be wrong
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


class Text(TextRuns):
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
