"""Commands about jobs that change their ranks, and about graphs: what is not there, what is no job, what never ends."""
import signal

from harness import TINY, Row
from rows_files import dangling, pipe, sparse
from rows_runs import RUN_FILES, interrupt, whole_lines

ELASTIC = ["train", "gpt", *TINY, "--epochs", "1000000", "--checkpoint-every", "5", "-n", "2", "--elastic", "1:2", "--out", "run"]
GRAPH = "graph(%0: f32[2]) {\n  return %0\n}\n"


def endless(path):
    path.symlink_to("/dev/zero")


def of_a_dead_process(path):
    path.write_text("process 4194303 on nowhere, since 2026-01-01 00:00:00 UTC\n")


# What lies where the lock of a run should be.
LOCKS = [("missing", None), ("a pipe", pipe), ("a link to endless zeros", endless), ("a link to nowhere", dangling), ("of a terabyte", sparse),
         ("left by a dead process", of_a_dead_process), ("garbage", b"\xff" * 1000)]

# Words, status, what is said.
WORDS = [
    ("resize/nothing", ["resize"], 2, r"run is required"),
    ("resize/no number", ["resize", "run"], 2, r"ranks is required"),
    ("resize/to 0", ["resize", "run", "0"], 2, r"expects a number from 1 to 65536, not"),
    ("resize/to more than can be", ["resize", "run", "4294967297"], 2, r"expects a number from 1 to 65536, not"),
    ("resize/to a word", ["resize", "run", "many"], 2, r"expects a number from 1 to 65536, not"),
    ("resize/nowhere", ["resize", "nowhere", "2"], 1, r"nobody trains in nowhere"),
    ("resize/no name", ["resize", "", "2"], 1, r"nobody trains in"),
    ("resize/a file", ["resize", "text", "2"], 1, r"nobody trains in text"),
    ("resize/a name that is not UTF-8", ["resize", b"\xff", "2"], 1, r"nobody trains in"),
    ("resize/process 1", ["resize", "1", "2"], 1, r"process 1 is no launcher"),
    ("resize/process 0", ["resize", "0", "2"], 1, r"process 0 is no launcher"),
    ("resize/a process that is not there", ["resize", "4194303", "2"], 1, r"process 4194303 is no launcher"),
    ("elastic/of nobody", ["run", "-n", "2", "--elastic", "0:2", "true"], 2, r"--elastic"),
    ("elastic/backwards", ["run", "-n", "2", "--elastic", "3:2", "true"], 2, r"--elastic"),
    ("elastic/beyond 32 bits", ["run", "-n", "2", "--elastic", "1:4294967298", "true"], 2, r"--elastic"),
    ("elastic/a word", ["run", "-n", "2", "--elastic", "many", "true"], 2, r"--elastic"),
    ("elastic/empty", ["run", "-n", "2", "--elastic", "", "true"], 2, r"--elastic expects MIN:MAX, not ''"),
    ("elastic/chaos empty", ["run", "-n", "2", "--chaos", "", "true"], 2, r"--chaos expects SEED\|PLAN, not ''"),
    ("elastic/rdzv empty", ["run", "-n", "2", "--rdzv", "", "true"], 2, r"--rdzv expects HOST:PORT, not ''"),
    ("elastic/device empty", ["train", "gpt", "--device", ""], 2, r"--device expects DEVICE, not ''"),
    ("elastic/fewer than there are", ["run", "-n", "4", "--elastic", "1:2", "true"], 2, r"--elastic"),
    ("join/without --elastic", ["run", "-n", "1", "--join", "127.0.0.1:1", "true"], 2, r"--elastic"),
    ("join/no address", ["run", "-n", "1", "--elastic", "1:2", "--join", "nowhere", "true"], {1, 2}, r"nowhere|several nodes need a secret"),
    ("join/without a secret", ["run", "-n", "1", "--elastic", "1:2", "--join", "127.0.0.1:1", "true"], {1, 2}, r"secret|CHORALE_SECRET_FILE"),
    ("graph/nothing", ["graph"], 2, r"graphs is required"),
    ("graph/nowhere", ["graph", "nowhere"], 1, r"'nowhere' is no file with graphs and no folder of a run"),
    ("graph/no name", ["graph", ""], 1, r"is no file with graphs and no folder of a run"),
    ("graph/a device", ["graph", "/dev/zero"], 1, r"is no file with graphs"),
    ("graph/of a text", ["graph", "text"], 1, r"there is no graph in 'text'"),
    ("graph/times 0", ["graph", "text", "--time", "0"], 2, r"--time"),
]

# What `graph` is given.
GRAPHS = [
    ("empty", "", r"there is no graph in 'g'"),
    ("a pipe", pipe, r"'g' is no file with graphs"),
    ("a link to nowhere", dangling, r"'g' is no file with graphs"),
    ("a terabyte", sparse, r"'g' has 1099511627776 bytes; files of graphs have at most"),
    ("without an end", "graph(%0: f32[2]) {\n", r"'g' ends inside of a graph"),
    ("not UTF-8", b"graph(\xff\xfe) {\n}\n", r"\[graph\] 'g': "),
    ("of a tensor that nobody made", "graph(%0: f32[2]) {\n  return %7\n}\n", r"\[graph\] 'g': "),
    ("of an op that is not there", "graph(%0: f32[2]) {\n  %1: f32[2] = frobnicate(%0)\n  return %1\n}\n", r"\[graph\] 'g': "),
    ("of sizes beyond counting", "graph(%0: f32[4294967296, 4294967296]) {\n  return %0\n}\n", r"\[graph\] 'g': "),
    ("deep", "graph(" + "(" * 100000 + ") {\n}\n", r"\[graph\] 'g': "),
]


def rows():
    found = [Row(f"elastic/{name}", words, status=status, says=(says,), within=20) for name, words, status, says in WORDS]
    found += [Row(f"elastic/resize/the lock is {name}", ["resize", "run", "2"], files={"run/.lock": content} if content else {"run": None},
                  says=(r"nobody trains in run on this host",), within=10) for name, content in LOCKS]
    found += [Row(f"elastic/graph/{name}", ["graph", "g", "--time", "1"], files={"g": content}, says=(says,), within=20) for name, content, says in GRAPHS]
    found += [
        Row("elastic/graph/of a run that was not compiled", ["graph", "run"], trained=True, says=(r"has no graphs: only one that was started with --compile",)),
        Row("elastic/graph/of a run whose graphs are pipes", ["graph", "run"], files={"run/graphs/g": pipe}, says=(r"not a regular file",), within=10),
        Row("elastic/graph/to a link", ["graph", "g", "-o", "l"], files={"g": GRAPH, "l": dangling}, says=("is a symbolic link to .*nowhere",)),
        Row("elastic/graph/to a full output", shell="$C graph g >/dev/full", files={"g": GRAPH}, status=4, says=("the output could not be written",), may_make=r"g\.html"),

        Row("elastic/a killed rank", shell=f"$C {' '.join(ELASTIC)} >said 2>&1 & job=$!; until ls run/checkpoints/step-*/manifest.json >/dev/null 2>&1; do kill -0 $job || exit 9; "
            "sleep 0.05; done; kill -KILL $(pgrep -P $job | tail -n 1); before=$(ls -d run/checkpoints/step-* | tail -n 1); "
            "until [ \"$(ls -d run/checkpoints/step-* | tail -n 1)\" != $before ]; do kill -0 $job || exit 8; sleep 0.05; done; kill -TERM $job; wait $job; echo status $?",
            status=0, says=(r"status 1(30|43)",), may_make=RUN_FILES + "|said", check=whole_lines, ci=False),
        Row("elastic/interrupt", ELASTIC, act=interrupt(signal.SIGINT), status=130, says=("interrupted after step",), may_make=RUN_FILES, check=whole_lines, ci=False),
        Row("elastic/closed descriptors", shell=f"$C {' '.join(ELASTIC)} --steps 20 <&- >&- 2>&-", status=0, may_make=RUN_FILES, check=whole_lines, ci=False),
        Row("elastic/to a full disk", shell=f"$C {' '.join(ELASTIC)} --steps 20 >/dev/full", status=4, may_make=RUN_FILES, check=whole_lines, ci=False),
        Row("elastic/where a run was", [*ELASTIC, "--steps", "2"], trained=True, says=("there is a run in run already",)),
        Row("elastic/resize of a job that is not elastic", shell=f"$C {' '.join(ELASTIC).replace('--elastic 1:2', '')} >/dev/null 2>&1 & job=$!; "
            "until [ -e run/metrics.jsonl ]; do kill -0 $job || exit 9; sleep 0.05; done; $C resize run 1; echo resize $?; $C resize $job 1; echo resize $?; "
            "kill -TERM $job; wait $job", status={130, 143}, says=(r"(?s)is no launcher of a job with --elastic.*resize 1.*is no launcher of a job with --elastic.*resize 1",),
            may_make=RUN_FILES),
        Row("elastic/resize beyond the limits", shell=f"$C {' '.join(ELASTIC)} >/dev/null 2>&1 & job=$!; "
            "until [ -e run/metrics.jsonl ]; do kill -0 $job || exit 9; sleep 0.05; done; $C resize run 7; echo resize $?; kill -TERM $job; wait $job", status={130, 143},
            says=(r"refused", "resize 1"), may_make=RUN_FILES),
    ]
    return found
