"""The page of a run in a real browser: as a file, with several runs, and live.

  report_test.py BIN_FOLDER

tests/browser.py and tests/example_run.py make pictures to look at (docs/dev/report.md).
"""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import example_run
from browser import Browser
from unittest_main import main

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve() / "chorale"

# How many points the curves of a section have.
POINTS = "[...document.querySelectorAll('#{} .curve')].map(curve => (curve.getAttribute('d').match(/[ML]/g) ?? []).length)"
TEXT = "document.getElementById('{}')?.textContent ?? ''"


class Page(unittest.TestCase):
    def setUp(self):
        # A browser that is missing must not look like a page that works: packages.txt has it.
        self.assertTrue(shutil.which("chromium"), "no chromium: run tools/setup test")
        temporary = tempfile.TemporaryDirectory(prefix="chorale-report-")
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def browser(self, **options):
        browser = Browser(**options)
        self.addCleanup(browser.__exit__)
        return browser

    def report(self, *args):
        done = subprocess.run([PROGRAM, "report", *map(str, args)], capture_output=True, text=True, cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        return (self.folder / done.stdout.strip()).as_uri(), done.stderr

    def opened(self, url, **options):
        browser = self.browser(**options)
        browser.open(url)
        browser.wait_for("document.querySelector('#loss .curve') !== null")
        return browser

    def test_fashion_mnist(self):
        run = example_run.write(self.folder / "run", lines=100)
        url, problems = self.report(run)
        self.assertEqual(problems, "")
        browser = self.opened(url)
        self.assertEqual(browser.evaluate(POINTS.format("loss")), [100, 100, 10])
        self.assertEqual(browser.evaluate(POINTS.format("accuracy")), [100, 10])
        self.assertEqual(browser.evaluate(POINTS.format("throughput")), [100, 100])
        # Two ranks, three parts of a step, one of which is striped, and memory.
        self.assertEqual(browser.evaluate("document.querySelectorAll('#ranks rect').length"), 2 * 4 + 2)
        self.assertEqual(browser.evaluate("document.querySelectorAll('#confusion rect.right').length"), 10)
        self.assertEqual(browser.evaluate("document.querySelectorAll('#worst canvas').length"), 20)
        # The pictures have the pixels of the file.
        pixels = example_run.evaluation(1)["worst"][0]["pixels"]
        drawn = browser.evaluate("btoa(String.fromCharCode(...document.querySelector('#worst canvas').getContext('2d')"
                                 ".getImageData(0, 0, 28, 28).data.filter((_, i) => i % 4 === 0)))")
        self.assertEqual(drawn, pixels)
        for word in "Example CPU", "0.1.0", "precision":
            self.assertIn(word, browser.evaluate(TEXT.format("config")))
        # Options stand there as they were used.
        options = browser.evaluate("[...document.querySelectorAll('#config .columns > div:first-child tr')].map(row => row.innerText)")
        self.assertTrue({"steps\t1000", "device\tcpu"} <= set(options), options)
        self.assertNotIn("used", browser.evaluate(TEXT.format("config")))
        self.assertEqual(browser.requests, [url], "the file is not self-contained")
        self.assertEqual(browser.complaints, [])

    def test_the_pointer_reads_values(self):
        run = example_run.write(self.folder / "run", lines=50)
        browser = self.opened(self.report(run)[0])
        box = browser.evaluate("(box => [box.x, box.y, box.width, box.height])(document.querySelector('#accuracy svg').getBoundingClientRect())")
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] - 12, y=box[1] + box[3] / 2)
        self.assertRegex(browser.wait_for("document.querySelector('#accuracy .tip:not([hidden])')?.textContent"), r"^step 500\D*91\.8 %$")

    def test_axes_can_be_changed(self):
        run = example_run.write(self.folder / "run", lines=50)
        browser = self.opened(self.report(run)[0])
        marks = "[...document.querySelectorAll('#loss text')].map(text => text.textContent).join(' ')"
        steps = browser.evaluate(marks)
        for name in "time", "logarithmic":
            browser.evaluate(f"[...document.querySelectorAll('button')].find(button => button.textContent === '{name}').click()")
            browser.wait_for("document.querySelector('#loss .curve') !== null")
        changed = browser.evaluate(marks)
        self.assertNotEqual(changed, steps)
        self.assertIn(" s", changed)
        self.assertEqual(browser.evaluate(POINTS.format("loss")), [50, 50, 10])
        self.assertEqual(browser.complaints, [])

    def test_samples_of_gpt_are_shown_as_text(self):
        run = example_run.write(self.folder / "run", kind="gpt", lines=100)
        browser = self.opened(self.report(run)[0])
        self.assertEqual(browser.evaluate("document.querySelectorAll('#samples details').length"), 10)
        self.assertIn("those <b>days</b>", browser.evaluate(TEXT.format("samples")))
        self.assertEqual(browser.evaluate("document.querySelectorAll('#samples b').length"), 0)
        self.assertTrue(browser.evaluate("document.getElementById('confusion').hidden"))
        self.assertEqual(browser.evaluate(POINTS.format("bits")), [100, 10])
        self.assertEqual(browser.complaints, [])

    def test_runs_are_compared(self):
        runs = [example_run.write(self.folder / name, lines=60, seed=seed) for seed, name in enumerate(["one", "two", "three"])]
        url, _ = self.report(*runs)
        self.assertTrue(url.endswith("/comparison.html"))
        browser = self.opened(url)
        self.assertEqual(browser.evaluate(POINTS.format("accuracy")), [60, 10] * 3)
        self.assertEqual(browser.evaluate("document.querySelectorAll('#overview tbody tr').length"), 3)
        self.assertRegex(browser.evaluate("document.querySelector('#config tbody').textContent"), r"^seed012$")
        self.assertEqual(browser.complaints, [])

    def test_nothing_sticks_out_on_a_phone_and_colours_follow_the_reader(self):
        run = example_run.write(self.folder / "run", lines=40)
        url, _ = self.report(run)
        paper = {}
        for dark in False, True:
            browser = self.opened(url, width=360, height=740, dark=dark)
            self.assertEqual(browser.evaluate("document.documentElement.scrollWidth"), 360)
            self.assertEqual(browser.complaints, [])
            paper[dark] = sum(map(int, re.findall(r"\d+", browser.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]))
        self.assertGreater(paper[False], 600)
        self.assertLess(paper[True], 150)

    def test_calls_between_workers_are_shown_by_pair(self):
        run = example_run.write(self.folder / "run", lines=5)
        pair = {"kind": "calls", "step": 50, "from": "trainer0", "to": "server", "calls": 1200, "failed": 3, "in_flight": 2,
                "sent_bytes": 4_500_000, "received_bytes": 900, "p50_us": 12.5, "p99_us": 2500}
        worker = {"kind": "worker", "step": 50, "name": "server", "queued": 4, "served": 2, "owned_references": 7, "held_references": 1, "threads": 16}
        with (run / "metrics.jsonl").open("a") as file:
            for line in {**pair, "calls": 600}, pair, {**pair, "from": "trainer<1>", "p50_us": None}, worker:
                file.write(json.dumps(line) + "\n")
        url, problems = self.report(run)
        self.assertEqual(problems, "")
        browser = self.opened(url, width=360, height=740)
        cells = browser.evaluate("[...document.querySelectorAll('#calls tbody tr')].map(row => [...row.children].map(cell => cell.textContent))")
        self.assertEqual(cells, [["trainer0 → server", "1,200", "3", "2", "4.5 MB", "900 B", "12.5 µs", "2.5 ms"],
                                 ["trainer<1> → server", "1,200", "3", "2", "4.5 MB", "900 B", "–", "2.5 ms"],
                                 ["server", "4", "2", "7", "1", "16"]])
        self.assertEqual(browser.evaluate("document.documentElement.scrollWidth"), 360)
        self.assertEqual(browser.complaints, [])

    def test_numbers_of_a_programs_own_are_drawn(self):
        run = example_run.write(self.folder / "run", lines=5)
        with (run / "metrics.jsonl").open("a") as file:
            for step in range(60, 100, 10):
                file.write(json.dumps({"kind": "train", "step": step, "seconds": step, "loss": 1, "reward": step / 4}) + "\n")
        url, problems = self.report(run)
        self.assertEqual(problems, "")
        browser = self.opened(url)
        self.assertIn("reward", browser.evaluate("document.getElementById('own-reward').textContent"))
        self.assertGreater(browser.evaluate("document.querySelectorAll('#own-reward svg path').length"), 0)
        self.assertEqual(browser.complaints, [])

    def test_lines_that_are_not_understood_are_named(self):
        run = example_run.write(self.folder / "run", lines=5)
        with (run / "metrics.jsonl").open("a") as file:
            file.write("not JSON\n")
        lines = len((run / "metrics.jsonl").read_text().splitlines())
        url, problems = self.report(run)
        self.assertIn(f"metrics.jsonl, line {lines}", problems)
        browser = self.opened(url)
        self.assertIn(f"metrics.jsonl, line {lines}", browser.evaluate(TEXT.format("problems")))

    def test_what_a_real_run_leaves_behind(self):
        run = self.folder / "run"
        command = [PROGRAM, "train", "fashion-mnist", "-n", "2", "--steps", "20", "--batch", "64", "--out", run, "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for rank in 0, 1:
            steps = [line["step"] for line in lines if line["kind"] == "time" and line["rank"] == rank]
            self.assertEqual(steps, [20])
        self.assertTrue(all(line["compute_ms"] > 0 and line["memory_mib"] > 1 for line in lines if line["kind"] == "time"))

        found = json.loads((run / "evaluation.json").read_text())
        self.assertEqual([sum(row) for row in found["confusion"]], [1000] * 10)
        right = sum(found["confusion"][k][k] for k in range(10))
        self.assertAlmostEqual(right / 10000, lines[-1]["test_accuracy"])
        self.assertEqual(len(found["worst"]), 24)
        self.assertTrue(all(one["label"] != one["guess"] for one in found["worst"]))
        self.assertEqual(found["worst"], sorted(found["worst"], key=lambda one: -one["probability"]))

        events = json.loads((run / "trace.json").read_text())["traceEvents"]
        for rank in 0, 1:
            tracks = {row["tid"]: row["args"]["name"] for row in events if row["pid"] == rank and row["name"] == "thread_name"}
            self.assertEqual(tracks[0], "computing")
            self.assertIn("communication: under way", tracks.values())
            own = [row for row in events if row["pid"] == rank and row["ph"] == "X"]
            self.assertEqual(sum(row["name"] == "optimizer" for row in own), 3)
            self.assertTrue(all(0 < row["ts"] < 60e6 and tracks[row["tid"]] for row in own))

        browser = self.opened((run / "report.html").as_uri())
        self.assertEqual(browser.evaluate("document.querySelectorAll('#worst canvas').length"), 20)
        self.assertEqual(browser.evaluate("document.querySelectorAll('#ranks .bars').length"), 2)
        self.assertEqual(browser.complaints, [])

    def test_a_live_page_follows_the_run(self):
        run = self.folder / "run"
        run.mkdir()
        watch = subprocess.Popen([PROGRAM, "watch", run, "--port", "0"], stdout=subprocess.PIPE, text=True)
        self.addCleanup(watch.stdout.close)
        self.addCleanup(watch.wait)
        self.addCleanup(watch.kill)
        url = re.search(r"http://\S+", watch.stdout.readline())[0]
        browser = self.browser()
        browser.open(url)
        browser.wait_for("document.querySelector('.state.on')?.textContent === 'waiting for the first step'")
        lines = [json.dumps(line) + "\n" for line in example_run.metrics("gpt", 30, seed=1)]
        so_far = 0
        with (run / "metrics.jsonl").open("a", buffering=1) as file:
            for part in lines[:20], lines[20:]:
                file.writelines(part)
                so_far += sum('"train"' in line for line in part)
                browser.wait_for(f"({POINTS.format('loss')})[0] === {so_far}")
        self.assertEqual(so_far, 30)
        self.assertEqual(browser.complaints, [])
        self.assertEqual(set(browser.requests), {url, url + "events"})
        watch.kill()
        browser.wait_for("document.querySelector('.state.off') !== null")


class GraphPage(unittest.TestCase):
    """`chorale graph`: compiled graphs as a page."""
    TEXT = """compiled 1 time, 1 graph, 0 breaks
graph(%0: f32[256, 128], %1: f32[64, 128], %2: f32[64]) {
  %3: f32[256, 64] = linear(%0, %1, %2)
  %4: f32[256, 64] = relu(%3)
  %5: f32[256, 64] = mul(%4, %4)
  %6: f32[64, 256]:[1, 64] = permute(%5) {dims=[1, 0]}
  %7: f32[64, 64] = matmul(%6, %5)
  return %7
}
guard: local arg 0 is f32[256, 128]
"""

    def setUp(self):
        self.assertTrue(shutil.which("chromium"), "no chromium: run tools/setup test")
        temporary = tempfile.TemporaryDirectory(prefix="chorale-graph-")
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def graph(self, *args):
        return subprocess.run([PROGRAM, "graph", *map(str, args)], capture_output=True, text=True, cwd=self.folder)

    def test_nodes_kernels_and_times(self):
        (self.folder / "step.txt").write_text(self.TEXT)
        done = self.graph("step.txt", "--fused", "--time", "3")
        self.assertEqual(done.returncode, 0, done.stderr)
        url = (self.folder / done.stdout.strip()).as_uri()
        browser = Browser()
        self.addCleanup(browser.__exit__)
        browser.open(url)
        rows = browser.evaluate("[...document.querySelectorAll('tbody tr')].map(row => [row.className, row.cells[1].textContent])")
        self.assertEqual(rows, [["kernel", "linear"], ["fused", "fused: relu, mul"], ["view", "permute"], ["kernel", "matmul"]])
        times = browser.evaluate("[...document.querySelectorAll('tbody tr')].map(row => parseFloat(row.cells[6].textContent))")
        self.assertTrue(times[0] > 0 and times[1] > 0 and times[2] is None and times[3] > 0, times)
        self.assertIn("4 nodes, 3 kernels, 3 inputs, 1 outputs", browser.evaluate("document.querySelector('.facts').textContent"))
        self.assertIn("// relu", browser.evaluate("document.querySelector('details pre').textContent"))
        self.assertEqual(browser.requests, [url], "the file is not self-contained")
        self.assertEqual(browser.complaints, [])

    def test_small_nodes_are_one_kernel(self):
        (self.folder / "step.txt").write_text(self.TEXT.replace("256", "16").replace("128", "16"))
        done = self.graph("step.txt", "--fused")
        self.assertEqual(done.returncode, 0, done.stderr)
        page = (self.folder / done.stdout.strip()).read_text()
        self.assertIn("block: linear, (relu, mul), permute, matmul", page)
        self.assertIn("f_product(16, 64, 16, ", page)

    def test_what_is_no_graph_is_said(self):
        (self.folder / "empty.txt").write_text("nothing\n")
        (self.folder / "cut.txt").write_text(self.TEXT[:200])
        (self.folder / "wrong.txt").write_text(self.TEXT.replace("relu", "reluu"))
        (self.folder / "run").mkdir()
        for name, said in (("empty.txt", "no graph in"), ("cut.txt", "ends inside of a graph"), ("wrong.txt", "not reluu"),
                           ("run", "has no graphs"), ("missing", "is no file")):
            with self.subTest(name):
                done = self.graph(name)
                self.assertEqual(done.returncode, 1)
                self.assertIn(said, done.stderr)


if __name__ == "__main__":
    main()
