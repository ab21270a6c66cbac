"""Output that cannot be written: the work is done, one warning, a status that says so; a reader that has gone ends the job."""
from harness import TINY, Row
from rows_files import pipe
from rows_limits import no_namespaces, on_small_disk

TRAIN = f"$C train gpt {' '.join(TINY)} --steps 4 --out run"
RUN_FILES = r"run(/.*)?"
LOST = "the output could not be written|the output cannot be written: No space left on device"


def trained(folder):
    return None if (folder / "run/checkpoints/step-00000004/manifest.json").exists() else "it has not trained to the end"


def both_done(folder):
    return None if all((folder / f"done_{rank}").exists() for rank in (0, 1)) else "the ranks have not finished their work"


def rows():
    found = []
    for name, words in (("help", "--help"), ("help of all", "--help-all"), ("version", "--version"), ("doctor", "doctor"), ("ops", "ops"), ("ops as JSON", "ops --json"),
                        ("help of train", "train gpt --help")):
        found.append(Row(f"output/{name} to a full disk", shell=f"$C {words} >/dev/full", status=4, says=(LOST,), ci=name != "ops as JSON"))
    found += [
        Row("output/report to a full disk", shell="$C report run >/dev/full", trained=True, status=4, says=(LOST,), may_change="run/report.html"),
        Row("output/generate to a full disk", shell="$C generate --run run --tokens 5 >/dev/full", trained=True, status=4, says=(LOST,)),
        Row("output/dry run to a full disk", shell=f"{TRAIN} -n 1 --dry-run >/dev/full", status=4, says=(LOST,)),
        Row("output/train to a full disk", shell=f"{TRAIN} -n 1 >/dev/full", status=4, says=(LOST,), may_make=RUN_FILES, check=trained),
        Row("output/train quietly to a full disk", shell=f"{TRAIN} -n 1 --quiet >/dev/full", status=4, says=(LOST,), may_make=RUN_FILES, check=trained),
        Row("output/train of two ranks to a full disk", shell=f"{TRAIN} -n 2 --max-restarts 2 >/dev/full", status=4, says=(LOST,), never_says=("starting again",),
            may_make=RUN_FILES, check=trained),
        Row("output/errors to a full disk", shell=f"{TRAIN} --lr inf 2>/dev/full", status=2),
        Row("output/train whose reader goes", shell=f"{TRAIN} --steps 100000 --epochs 100000 -n 1 | head -n 1; echo status ${{PIPESTATUS[0]}}", status=0,
            says=(r"GPT: 1,440 bytes", r"status (141|1)\n"), may_make=RUN_FILES),
        Row("output/train of two ranks whose reader goes", shell=f"{TRAIN} --steps 100000 --epochs 100000 -n 2 --grace 5 | head -n 1; echo status ${{PIPESTATUS[0]}}",
            status=0, says=(r"GPT: 1,440 bytes", r"status (141|1)\n"), may_make=RUN_FILES, ci=False),
        Row("output/ops whose reader goes", shell="$C ops --json | head -c 10; status=${PIPESTATUS[0]}; echo; echo status $status", status=0, says=(r"status (141|1|0)\n",)),
        Row("output/generate whose reader goes", shell="$C generate --run run --tokens 100000 | head -c 1; status=${PIPESTATUS[0]}; echo; echo status $status", trained=True, status=0,
            says=(r"status (141|1)\n",), within=30),
        Row("output/generate", ["generate", "--run", "run", "--tokens", "5", "--prompt", "the"], trained=True, status=0, says=("the",)),
        Row("output/generate after bytes that are no text", ["generate", "--run", "run", "--tokens", "5", "--prompt", b"\xff\xfe"], trained=True, status=0),
        Row("output/generate without tokens", ["generate", "--run", "run", "--tokens", "0", "--prompt", "the"], trained=True, status=0, says=("the",)),
        Row("output/generate with top-p 0", ["generate", "--run", "run", "--tokens", "5", "--top-p", "0"], trained=True, status={0, 1, 2}),
        Row("output/generate of the coldest", ["generate", "--run", "run", "--tokens", "5", "--temperature", "1e-300"], trained=True, status={0, 1}),
        Row("output/generate of the hottest", ["generate", "--run", "run", "--tokens", "5", "--temperature", "1000000"], trained=True, status=0),
        Row("output/log-dir is a file", [*"train gpt".split(), *TINY, "--steps", "2", "-n", "2", "--log-dir", "text"], status={1, 126}, says=("text",)),
        Row("output/run with a log-dir that is a file", ["run", "-n", "2", "--log-dir", "text", "true"], status={1, 126}, says=("text",)),
        Row("output/run with a log-dir on a full disk", shell=on_small_disk(16, "$C run -n 2 --log-dir logs sh -c \"seq 20000; touch ../done_\\$RANK\""), status=4,
            files={"disk": None}, says=(r"\[0\] 20000\n", r"cannot write logs/rank_\d\.log: No space left on device; what the rank printed is not all there"),
            may_make=r"done_\d", check=both_done, needs=no_namespaces),
        Row("output/run with a log-dir and small files", shell="(ulimit -f 8; $C run -n 2 --log-dir logs sh -c 'seq 20000; touch done_$RANK') 2>&1 | cat; exit ${PIPESTATUS[0]}",
            status=4, says=(r"cannot write logs/rank_\d\.log: File too large",), may_make=r"done_\d|logs(/.*)?", check=both_done),
        Row("output/run with a log that is a pipe", ["run", "-n", "2", "--log-dir", "logs", "true"], files={"logs/rank_1.log": pipe}, status=126, may_make="logs/.*",
            says=("cannot write logs/rank_1.log: it is not a regular file",), within=10),
        Row("output/run with a log of another job", ["run", "-n", "2", "--log-dir", "logs", "echo", "now"], files={"logs/rank_1.log": "earlier\n"}, status=0,
            may_make="logs/.*", may_change="logs/rank_1.log",
            check=lambda folder: None if (folder / "logs/rank_1.log").read_text() == "earlier\nnow\n" else "the log has lost something"),
        Row("output/run with a log-dir below a file", ["run", "-n", "2", "--log-dir", "text/x", "true"], status={1, 126}, says=("text",)),
    ]
    return found
