"""Folders of runs: what is in the way stays, what goes on is what was begun, and one job at a time trains in one."""
import json
import os
import signal

from harness import TINY, Row
from rows_files import dangling, pipe, sparse

GPT = ["train", "gpt", *TINY]
RESUME = ["train", "gpt", "--out", "run", "--resume", "--steps", "6"]
SHORT = ["--steps", "2", "-n", "1"]
# Long enough to be met while it trains.
LONG = [*GPT, "--epochs", "1000000", "--checkpoint-every", "5", "--out", "run"]
RUN_FILES = r"run(/.*)?"


def edit(**changes):
    def change(path):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return change


def remove(path):
    path.unlink()


def linked(path):
    path.unlink(missing_ok=True)
    path.symlink_to("../mine")


def append(text):
    def change(path):
        with open(path, "a") as file:
            file.write(text)
    return change


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace(content):
    def change(path):
        path.unlink()
        if content is None:
            path.mkdir()
        else:
            content(path)
    return change


def whole_lines(folder):
    for number, line in enumerate((folder / "run" / "metrics.jsonl").read_bytes().splitlines(True), 1):
        try:
            json.loads(line)
        except ValueError:
            return f"line {number} of metrics.jsonl is no JSON: {line[:60]}"
        if not line.endswith(b"\n"):
            return "metrics.jsonl ends in the middle of a line"
    return None


def at_step(step):
    return lambda folder: None if (folder / f"run/checkpoints/step-{step:08}/manifest.json").exists() else f"there is no checkpoint of step {step}"


def options_kept(folder):
    options = json.loads((folder / "run/config.json").read_text())
    kept = {"batch": 4, "seed": 1, "lr": 0.002}
    return None if {name: options[name] for name in kept} == kept else f"the run went on with {options}"


def interrupt(number, times=1):
    def act(running):
        running.wait_for_file("run/metrics.jsonl")
        for _ in range(times):
            running.process.send_signal(number)
    return act


def kill_rank(running):
    running.wait_for_file("run/checkpoints/step-*/manifest.json")
    os.kill(running.ranks()[-1], signal.SIGKILL)


def rows():
    found = []
    for name, content in (("a file", "my notes"), ("a pipe", pipe), ("a link to nowhere", dangling)):
        for ranks in "1", "2":
            found.append(Row(f"runs/out is {name}, {ranks} ranks", [*GPT, "--steps", "2", "-n", ranks, "--out", "x"], files={"x": content},
                             says=(r"--out x must be a folder, or become one, but .*/x is something else; nothing was changed",)))
    for name, out, status, says in (
        ("below a file", "text/x", 1, r"/text is something else"),
        ("a device", "/dev/null", 1, r"/dev/null is something else"),
        ("where nothing can be made", "/proc/x/y", 1, r"/proc/x"),
        ("of a very long name", "x" * 300, 1, r"File name too long|too long"),
        ("a run", "run", 1, r"there is a run in run already"),
    ):
        found.append(Row(f"runs/out is {name}", [*GPT, *SHORT, "--out", out], trained=out == "run", status=status, says=(says,)))
    found += [
        Row("runs/a failing job removes nothing that was there", [*GPT, "--batch", "100000", "-n", "2", "--out", "x"], files={"x": None}, says=("is larger than the",)),
        Row("runs/a failing job leaves no folder", [*GPT, "--batch", "100000", "-n", "2", "--out", "x/y/z"], says=("is larger than the",)),
        Row("runs/a failing job of one rank leaves no folder", [*GPT, "--batch", "100000", "-n", "1", "--out", "x/y/z"], says=("is larger than the",)),
        Row("runs/a failing job without --out leaves no folder", [*GPT, "--batch", "100000", "-n", "1"], says=("is larger than the",)),
        Row("runs/a name that is not UTF-8", [*GPT, *SHORT, "--out", b"r\xff"], status=0, may_make=r"r.*"),
        Row("runs/a name with spaces and quotes", [*GPT, *SHORT, "--out", "a 'b' \"c\""], status=0, may_make=r"a.*"),
        Row("runs/a dry run makes nothing", [*GPT, *SHORT, "--dry-run", "--out", "x"], status=0, says=("parameters",)),

        Row("runs/resume goes on", RESUME, trained=True, status=0, may_change=RUN_FILES, may_make=RUN_FILES, check=at_step(6), says=("going on behind step 4",)),
        Row("runs/resume without config.json", RESUME, trained=True, files={"run/config.json": remove}, status=0, may_change=RUN_FILES, may_make=RUN_FILES,
            check=options_kept, says=(r"config\.json is not there; the run goes on with what .*step-00000004/manifest\.json says",)),
        Row("runs/resume with an edited config.json", RESUME, trained=True, files={"run/config.json": edit(batch=8, seed=7, lr=0.5)}, status=0,
            may_change=RUN_FILES, may_make=RUN_FILES, check=options_kept,
            says=(r"says batch = 8, but it was 4", r"says seed = 7, but it was 1", r"says lr = 0\.5, but it was 0\.002")),
        Row("runs/resume with a damaged config.json", RESUME, trained=True, files={"run/config.json": "{"}, status=0, may_change=RUN_FILES, may_make=RUN_FILES,
            check=options_kept, says=(r"config\.json is not JSON",)),
        Row("runs/resume with config.json a folder", RESUME, trained=True, files={"run/config.json": replace(None)}, status=1, may_change=RUN_FILES, may_make=RUN_FILES,
            says=(r"config\.json",)),
        Row("runs/resume with another batch", [*RESUME, "--batch", "8"], trained=True, says=("--batch was 4, not 8",)),
        Row("runs/resume with another learning rate", [*RESUME, "--lr", "1"], trained=True, says=("--lr was 0.002, not 1",)),
        Row("runs/resume with metrics cut", RESUME, trained=True, files={"run/metrics.jsonl": append('{"kind": "tra')}, status=0, may_change=RUN_FILES,
            may_make=RUN_FILES, says=(r"metrics\.jsonl had 1 damaged line, cut off at byte",), check=whole_lines),
        Row("runs/resume with metrics cut in the middle", RESUME, trained=True, files={"run/metrics.jsonl": append('{"kind": "tra{"kind": "x", "step": 4}\n{"step": 4}\n')},
            status=0, may_change=RUN_FILES, may_make=RUN_FILES, says=(r"had 1 damaged line",), check=whole_lines),
        Row("runs/resume with metrics of garbage", RESUME, trained=True, files={"run/metrics.jsonl": b"\xff" * 1000}, status=0, may_change=RUN_FILES, may_make=RUN_FILES,
            says=(r"had 1 damaged line",), check=whole_lines),
        Row("runs/resume without metrics", RESUME, trained=True, files={"run/metrics.jsonl": remove}, status=0, may_change=RUN_FILES, may_make=RUN_FILES, check=whole_lines),
        Row("runs/resume with metrics a pipe", RESUME, trained=True, files={"run/metrics.jsonl": replace(pipe)}, may_change=RUN_FILES, may_make=RUN_FILES,
            says=("metrics.jsonl.*not a regular file",), within=20),
        Row("runs/resume with metrics a folder", RESUME, trained=True, files={"run/metrics.jsonl": replace(None)}, may_change=RUN_FILES, may_make=RUN_FILES,
            says=("metrics.jsonl.*not a regular file",)),
        Row("runs/resume with a damaged index", RESUME, trained=True, files={"run/checkpoints/step-00000004/index.json": damage},
            says=(r"index\.json is damaged", "--resume-previous")),
        Row("runs/resume without the index", RESUME, trained=True, files={"run/checkpoints/step-00000004/index.json": remove},
            says=(r"index\.json", "--resume-previous")),
        Row("runs/resume with a damaged manifest", RESUME, trained=True, files={"run/checkpoints/step-00000004/manifest.json": damage},
            says=(r"manifest\.json is damaged", "--resume-previous")),
        Row("runs/resume from the checkpoint before", ["train", "gpt", "--out", "run", "--resume-previous", "--steps", "6"], trained=True,
            files={"run/checkpoints/step-00000004/manifest.json": damage}, status=0, may_change=RUN_FILES, may_make=RUN_FILES, may_go=r"run/checkpoints/step-00000004/rank-.*",
            says=("going on behind step 2",), check=at_step(6)),
        Row("runs/resume with checkpoints a file", RESUME, files={"run/checkpoints": "x"}, says=(r"run/checkpoints should be a folder, but is something else",)),
        Row("runs/generate with checkpoints a file", ["generate", "--run", "run"], files={"run/checkpoints": "x"}, says=(r"run/checkpoints should be a folder",)),
        Row("runs/generate removes nothing half-written", ["generate", "--run", "run", "--tokens", "3"], trained=True,
            files={"run/checkpoints/.step-00000006.new/rank-0-7.safetensors": "half"}, status=0),
        Row("runs/resume removes nothing but its own leftovers", RESUME, trained=True,
            files={"run/checkpoints/.step-00000006.new/rank-0-7.safetensors": "half", "run/checkpoints/step-best/notes": "mine", "run/notes": "mine"}, status=0,
            may_change=RUN_FILES, may_make=RUN_FILES, may_go=r"run/checkpoints/\.step.*",
            check=lambda folder: "a leftover stayed" if (folder / "run/checkpoints/.step-00000006.new").exists() else None),
        Row("runs/resume of a complete run", ["train", "gpt", "--out", "run", "--resume"], trained=True, status=0, may_change=RUN_FILES, may_make=RUN_FILES),
        Row("runs/resume behind the end", ["train", "gpt", "--out", "run", "--resume", "--steps", "3"], trained=True, says=("is at step 4 already",),
            may_change=RUN_FILES, may_make=RUN_FILES),
        Row("runs/resume of another task", ["train", "bert", "--out", "run", "--resume"], trained=True, says=("run",)),
        Row("runs/resume nowhere", ["train", "gpt", "--out", "nowhere", "--resume"], says=("there is no run in nowhere",)),
        Row("runs/resume in an empty folder begins", [*GPT, *SHORT, "--out", "x", "--resume"], files={"x": None}, status=0, may_make="x/.*",
            says=("there is no checkpoint yet",)),
        Row("runs/resume with another text", RESUME, trained=True, files={"text": "another text. " * 100}, says=("learnt from other data",), may_change=RUN_FILES, may_make=RUN_FILES),
        Row("runs/a lock of a process that is gone", RESUME, trained=True, files={"run/.lock": "process 1 on nowhere\n"}, status=0, may_change=RUN_FILES,
            may_make=RUN_FILES, may_go=r"run/\.lock"),
        Row("runs/a lock that is a link", RESUME, trained=True, files={"run/.lock": lambda path: path.symlink_to("../text")}, says=(r"run/\.lock",)),
        *[Row(f"runs/resume, and {name} is a link", RESUME, trained=True, files={"mine": "not yours", f"run/{name}": linked}, within=20,
              says=(rf"cannot write .*run/{name}.*: it is a symbolic link to .*mine",))
          for name in ("metrics.jsonl", "config.json", "trace.json", "report.html")],
        Row("runs/report, and its page is a link", ["report", "run"], trained=True, files={"mine": "not yours", "run/report.html": linked},
            says=(r"cannot write .*run/report\.html.*: it is a symbolic link to .*mine",)),
        Row("runs/a manifest of a terabyte", RESUME, trained=True, files={"run/checkpoints/step-00000004/manifest.json": sparse}, within=20,
            says=(r"manifest\.json is damaged: it has 1099511627776 bytes, and no manifest more than 10000000",)),
        Row("runs/metrics of a terabyte", RESUME, trained=True, files={"run/metrics.jsonl": sparse}, within=20, may_change=r"run/config\.json", may_make=RUN_FILES,
            says=(r"metrics\.jsonl has 1099511627776 bytes; at most 4294967296 are read",)),
        Row("runs/report of metrics of a terabyte", ["report", "run"], trained=True, files={"run/metrics.jsonl": sparse}, within=20,
            says=(r"metrics\.jsonl has 1099511627776 bytes; at most 4294967296 are read",)),
        Row("runs/a folder of other folders", [*GPT, *SHORT, "--out", "home"], files={"home/letters/one": "mine"},
            says=(r"--out home is not a run's folder: it holds another folder, letters",)),
        Row("runs/the root of all folders", [*GPT, *SHORT, "--out", "/"], says=(r"--out / is not a run's folder",)),
        Row("runs/a folder with notes, and that of the logs", [*GPT, *SHORT, "--out", "run", "--log-dir", "run/logs"], files={"run/notes": "mine", "run/logs": None},
            status=0, may_make=RUN_FILES),

        Row("runs/two jobs in one folder", shell=f"$C {' '.join(LONG)} -n 1 >/dev/null & first=$!\n"
            "until ls run/checkpoints/step-*/manifest.json >/dev/null 2>&1; do kill -0 $first || exit 9; sleep 0.05; done\n"
            "$C train gpt --out run --resume -n 1; second=$?\n$C train gpt --text text --out run -n 1; third=$?\n"
            "kill -0 $first && kill -TERM $first; wait $first; echo statuses $second $third $?",
            status=0, says=(r"a job is training in run already: process \d+ on \S+, since", r"there is a run in run already", r"statuses 1 1 130"), may_make=RUN_FILES,
            check=whole_lines, within=60),
        Row("runs/two jobs of two ranks in one folder", shell=f"$C {' '.join(LONG)} -n 2 >/dev/null & first=$!\n"
            "until ls run/checkpoints/step-*/manifest.json >/dev/null 2>&1; do kill -0 $first || exit 9; sleep 0.05; done\n"
            "$C train gpt --out run --resume -n 2; second=$?\n"
            "kill -0 $first && kill -TERM $first; wait $first; echo statuses $second $?",
            status=0, says=(r"a job is training in run already: process \d+", r"statuses 1 143"), may_make=RUN_FILES, check=whole_lines, within=60, ci=False),

        Row("runs/the loss is not finite", [*GPT, "-n", "1", "--lr", "1000000", "--clip", "0", "--optimizer", "sgd", "--steps", "60", "--epochs", "50", "--schedule",
            "constant", "--warmup", "0", "--checkpoint-every", "1", "--keep", "1", "--out", "run"], status=3, may_make=RUN_FILES,
            says=(r"step \d+: (the loss is|a gradient is not finite)", "on rank 0 it is", r"The last checkpoint, .*, is as it was|There is no checkpoint yet",
                  "--on-nan continue")),
        Row("runs/the loss is not finite, two ranks that could restart", [*GPT, "-n", "2", "--lr", "1000000", "--clip", "0", "--optimizer", "sgd", "--steps", "60",
            "--epochs", "50", "--schedule", "constant", "--warmup", "0", "--max-restarts", "3", "--out", "run"], status=3, may_make=RUN_FILES,
            says=(r"step \d+: (the loss is|a gradient is not finite)", "on rank 1 it is"), never_says=("starting again",)),
        Row("runs/the loss is not finite, and no matter", [*GPT, "-n", "1", "--lr", "1000000", "--clip", "0", "--optimizer", "sgd", "--steps", "60", "--epochs", "50",
            "--schedule", "constant", "--warmup", "0", "--on-nan", "continue", "--out", "run"], status=0, may_make=RUN_FILES),

        Row("runs/interrupt", [*LONG, "-n", "1"], act=interrupt(signal.SIGINT), status=130, says=("interrupted after step", "chorale train gpt --out run --resume"),
            may_make=RUN_FILES, check=whole_lines),
        Row("runs/interrupt of two ranks", [*LONG, "-n", "2"], act=interrupt(signal.SIGINT), status=130, says=("interrupted after step",), may_make=RUN_FILES,
            check=whole_lines),
        Row("runs/terminate", [*LONG, "-n", "1"], act=interrupt(signal.SIGTERM), status={130, 143}, says=("interrupted after step",), may_make=RUN_FILES,
            check=whole_lines, ci=False),
        Row("runs/kill", [*LONG, "-n", "2"], act=interrupt(signal.SIGKILL), status=-9, may_make=RUN_FILES, ci=False),
        Row("runs/a killed rank", [*LONG, "-n", "2"], act=kill_rank, status=137, says=("rank 1 .*killed by SIGKILL",), may_make=RUN_FILES, ci=False),
    ]
    return found
