"""Training jobs whose ranks share one model: split layers, fully sharded ones, and both.

  train_split_test.py BIN_FOLDER
"""
import json
import re
import shutil
import subprocess

from training_runs import LIMIT_S, PROGRAM, TextRuns
from unittest_main import main


class Split(TextRuns):
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

    def test_split_models_train_from_graphs_as_they_do_without(self):
        options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--dropout", "0.1", "--clip", "0.5", "--lr", "0.01", "--epochs", "50", "--log-every", "1", "--steps", "6")
        for name, split, task in (("tp", ("-n", "2", "--tp", "2"), "gpt"), ("sequences", ("-n", "2", "--tp", "2", "--sequence-parallel"), "bert"),
                                  ("replicas", ("--dp", "2", "--tp", "2"), "gpt"), ("sharded", ("-n", "4", "--tp", "2", "--fsdp"), "gpt")):
            with self.subTest(name):
                self.run_to_end(*options, *split, "--out", f"{name}-eager", task=task)
                self.run_to_end(*options, *split, "--compile", "--out", f"{name}-graphs", task=task)
                self.assert_close(self.losses(f"{name}-graphs"), self.losses(f"{name}-eager"))
                graphs = "".join(path.read_text() for path in (self.folder / f"{name}-graphs" / "graphs").iterdir())
                self.assertIn("collective", graphs)
                if name != "sharded":  # whose parameters are elsewhere when it evaluates
                    self.assertNotIn("recompiled", graphs)

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

    def test_a_run_goes_on_with_another_layout_of_ranks_that_says_how_many_there_are(self):
        options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--lr", "0.01", "--epochs", "50", "--log-every", "1", "--schedule", "constant", "--warmup", "0")
        self.run_to_end(*options, "-n", "4", "--out", "whole", "--steps", "6", task="gpt")
        self.run_to_end(*options, "-n", "1", "--out", "run", "--steps", "2", task="gpt")
        self.assertIn("ranks: 4 (2 x 2 that share a model)", self.run_to_end("--out", "run", "--resume", "--steps", "4", "--fsdp", "--hybrid", "2x2", task="gpt"))
        self.assertIn("ranks: 2 (1 x 2)", self.run_to_end("--out", "run", "--resume", "--steps", "6", "--tp", "2", "--dp", "1", task="gpt"))
        self.assert_close(self.losses("run"), self.losses("whole"))

    def test_sharded_layers_from_graphs_and_with_short_gradients_train_as_whole_ones_do(self):
        options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--lr", "0.01", "--epochs", "50", "--log-every", "1", "--steps", "6", "-n", "2", "--sample-tokens", "0")
        self.run_to_end(*options, "--out", "whole", task="gpt")
        self.run_to_end(*options, "--fsdp", "--compile", "--out", "graphs", task="gpt")
        self.assert_close(self.losses("graphs"), self.losses("whole"))
        self.run_to_end(*options, "--compress", "bf16", "--out", "short", task="gpt")
        self.run_to_end(*options, "--fsdp", "--compress", "bf16", "--out", "both", task="gpt")
        self.assert_close(self.losses("both"), self.losses("short"))
        self.assertNotEqual(self.losses("both"), self.losses("whole"))

    def test_replicas_of_layers_that_are_split_and_shared_out_train_as_replicas_do(self):
        options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--lr", "0.01", "--epochs", "50", "--log-every", "1", "--schedule", "constant", "--warmup", "0")
        self.run_to_end(*options, "-n", "4", "--out", "four", "--steps", "4", task="gpt")
        out = self.run_to_end(*options, "--fsdp", "--hybrid", "2x2", "--tp", "2", "--out", "all", "--steps", "2", task="gpt")
        self.assertIn("ranks: 8 (4 x 2)", out)
        self.run_to_end("--out", "all", "--resume", "--steps", "4", "-n", "4", "--tp", "1", task="gpt")
        self.assert_close(self.losses("all"), self.losses("four"))

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

    def test_rows_that_are_split_in_unequal_parts_are_trained_by_every_kind_of_optimizer(self):
        """Of 261 tokens the ranks of --tp have 131 and 130, of which --fsdp leaves 66, 65, 65 and 65. Lamb wants norms of whole tensors."""
        (self.folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 261, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}))
        options = ("--text", "text", "--tokenizer", "bytes", "--model-config", "config.json", "--context", "32", "--batch", "8", "--log-every", "1", "--steps", "4",
                   "--epochs", "50", "--lr", "0.01", "--sample-tokens", "0")
        for optimizer in "adamw", "lamb":
            with self.subTest(optimizer):
                self.run_to_end(*options, "--optimizer", optimizer, "-n", "2", "--out", f"{optimizer}-whole", task="gpt")
                self.run_to_end(*options, "--optimizer", optimizer, "-n", "4", "--tp", "2", "--fsdp", "--out", f"{optimizer}-parts", task="gpt")
                self.assert_close(self.losses(f"{optimizer}-parts"), self.losses(f"{optimizer}-whole"))

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
        # A folder in which a file is just being written is busy: then it is tried again.
        for how, broken, mended, why in (("full", "dd if=/dev/zero of=fill bs=4k", "rm fill", "No space left on device"),
                                         ("read-only", "mount --bind run/checkpoints run/checkpoints; until mount -o remount,ro,bind run/checkpoints; do :; done", "umount run/checkpoints", "Read-only file system")):
            with self.subTest(how):
                (self.folder / how).mkdir()
                script = f"""
                    mount -t tmpfs -o size=8m none {how} && cp text {how} && cd {how} || exit 9
                    {PROGRAM} train gpt {options} --steps 100000 >../out-{how} 2>../err-{how} & job=$!
                    for i in $(seq 1200); do compgen -G 'run/checkpoints/step-*/index.json' >/dev/null && break; sleep 0.05; done
                    {{ {broken}; }} 2>/dev/null
                    wait $job; echo "ended with $?"; echo "left: $(ls -A run/checkpoints | grep -c new)"
                    {{ {mended}; }} || exit 8
                    for last in run/checkpoints/step-*; do {PROGRAM} checkpoint verify $last || exit 7; done
                    step=$((10#${{last##*-}}))
                    {PROGRAM} train gpt --out run --resume --fsdp --steps $((step + 5)) || exit 6
                """
                done = subprocess.run(["unshare", "-m", "bash", "-c", script], cwd=self.folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
                error = (self.folder / f"err-{how}").read_text()
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr + error)
                self.assertIn("ended with 1", done.stdout, error)
                if how == "full":
                    self.assertIn("left: 0", done.stdout)
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
                           (("--fsdp", "--tp", "2", "--hybrid", "2x1"), "--hybrid 2x1 and --tp 2 are 4 ranks, but the job has 2"),
                           (("--fsdp", "--compress", "powersgd"), "choose --compress bf16, or leave it out"),
                           (("--tp", "2", "--fp8"), "--fp8 is not for layers that --tp splits"),
                           (("--tp", "2", "--optimizer", "lamb"), "choose another one, or add --fsdp")):
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

    def test_layers_of_eight_bits_train_as_others_do_and_go_on_with_the_same_bits(self):
        options = ("--text", "text", "--tokenizer", "bytes", *self.TINY, "--lr", "0.01", "--epochs", "50", "--log-every", "1", "--precision", "bf16")
        for task in ("gpt", "bert"):
            with self.subTest(task):
                self.run_to_end(*options, "-n", "1", "--out", "plain", "--steps", "12", task=task)
                self.run_to_end(*options, "-n", "1", "--fp8", "--out", "all", "--steps", "12", task=task)
                self.run_to_end(*options, "-n", "1", "--fp8", "--out", "two", "--steps", "12", "--checkpoint-every", "6", task=task)
                shutil.rmtree(self.folder / "two/checkpoints/step-00000012")
                self.run_to_end("--out", "two", "--resume", "--steps", "12", task=task)
                self.assertEqual(self.weights("two"), self.weights("all"))
                self.run_to_end(*options, "-n", "2", "--fsdp", "--fp8", "--out", "sharded", "--steps", "12", task=task)
                self.assertNotEqual(self.losses("plain"), self.losses("all"))
                for run in ("plain", "sharded"):
                    for a, b in zip(self.losses(run), self.losses("all")):
                        self.assertAlmostEqual(a, b, delta=0.03 * a)
                for run in ("plain", "all", "two", "sharded"):
                    shutil.rmtree(self.folder / run)

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


if __name__ == "__main__":
    main()
