"""Commands that are programs of their own work as if `chorale` had them."""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from unittest_main import main

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/debug/bin"


def run(program, *words):
    done = subprocess.run([program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


class Programs(unittest.TestCase):
    def test_words_status_and_output_are_those_of_the_other_program(self):
        for words in (["bench", "ops", "--only", "no such case"], ["bench", "--help"], ["bench", "ops", "--help"], ["bench"],
                      ["bench", "oops"]):
            with self.subTest(words):
                self.assertEqual(run(PROGRAMS / "chorale", *words), run(PROGRAMS / "chorale-bench", *words))

    def test_an_error_has_the_name_that_was_typed(self):
        code, out, err = run(PROGRAMS / "chorale", "bench", "oops")
        self.assertEqual((code, out), (2, ""))
        self.assertIn("chorale bench: no command 'oops'; did you mean 'ops'?", err)

    def test_help_of_a_command_of_it_is_its_own(self):
        code, out, _ = run(PROGRAMS / "chorale", "bench", "collectives", "--help")
        self.assertEqual(code, 0)
        self.assertIn("--most-bytes", out)

    def test_a_recommender_is_trained_by_a_server_and_trainers_and_leaves_its_page(self):
        with tempfile.TemporaryDirectory() as folder:
            run_folder = pathlib.Path(folder) / "run"
            code, out, err = run(PROGRAMS / "chorale", "train", "recommender", "-n", "2", "--steps", "120", "--out", str(run_folder))
            self.assertEqual(code, 0, out + err)
            lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
            page = (run_folder / "report.html").read_text()
        losses = [line["loss"] for line in lines if line["kind"] == "train"]
        self.assertEqual(len(losses), 12)
        self.assertLess(sum(losses[-3:]), 0.8 * sum(losses[:3]))
        self.assertGreater([line["test_accuracy"] for line in lines if line["kind"] == "evaluation"][-1], 0.7)
        calls = {(line["from"], line["to"]): line for line in lines if line["kind"] == "calls"}
        for trainer in "trainer0", "trainer1":
            # A forward and a step of the optimizer in each of 120 steps, and some to begin with.
            self.assertGreaterEqual(calls[trainer, "server"]["calls"], 238)
            self.assertEqual(calls[trainer, "server"]["failed"], 0)
        self.assertEqual({line["name"] for line in lines if line["kind"] == "worker"}, {"trainer0", "trainer1", "server"})
        self.assertIn("trainer1", page)

    def test_a_recommender_trains_from_graphs_as_it_does_without(self):
        losses = []
        with tempfile.TemporaryDirectory() as folder:
            for name, extra in ("eager", ()), ("graphs", ("--compile",)):
                run_folder = pathlib.Path(folder) / name
                code, out, err = run(PROGRAMS / "chorale", "train", "recommender", "-n", "1", "--steps", "30", "--log-every", "1", *extra, "--out", str(run_folder))
                self.assertEqual(code, 0, out + err)
                lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
                losses.append([line["loss"] for line in lines if line["kind"] == "train"])
            text = (run_folder / "graphs" / "forward.txt").read_text()
        for compiled, eager in zip(losses[1], losses[0], strict=True):
            self.assertAlmostEqual(compiled, eager, delta=1e-5)
        self.assertIn("2 graphs, 0 breaks", text)

    def test_without_the_other_program_the_error_says_how_to_get_it(self):
        with tempfile.TemporaryDirectory() as folder:
            alone = pathlib.Path(folder) / "chorale"
            shutil.copy(PROGRAMS / "chorale", alone)
            code, _, err = run(alone, "bench", "ops")
        self.assertEqual(code, 1)
        self.assertIn("/chorale-bench cannot be started: No such file or directory", err)
        self.assertIn("`./chorale bench` builds it", err)


if __name__ == "__main__":
    main()
