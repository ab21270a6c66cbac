"""Commands that are programs of their own: checkpoint, the recommender, fully sharded training; and devices that are not there."""
import json
import os
import re
import signal

from harness import TINY, Row
from rows_files import dangling, pipe, sparse
from rows_limits import no_namespaces, on_small_disk
from rows_runs import RUN_FILES, damage, interrupt, remove, replace, whole_lines

LAST = "run/checkpoints/step-00000004"
GPT = f"train gpt {' '.join(TINY)}"
FULLY = f"$C {GPT} -n 2 --fsdp --out run"
SHARDED = [*GPT.split(), "-n", "2", "--fsdp"]
LIKES = ["train", "recommender", "--steps", "20"]


def index(change):
    """Edits the index of the last checkpoint; without its manifest, which would notice."""
    def edit(path):
        (path.parent / "manifest.json").unlink()
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
    return edit


def part(content):
    """Of the first tensor."""
    return next(iter(content["tensors"].values()))["chunks"][0]


def tensor(shape, chunks=()):
    def change(content):
        whole = [dict(part(content), offsets=[0] * len(shape), sizes=size) for size in chunks]
        content["tensors"]["x"] = {"dtype": "f32", "shape": shape, "chunks": whole}
    return change


def ranks_file(change):
    """Does it to the file of rank 0 of the last checkpoint, whatever its number is."""
    def act(path):
        change(next(path.parent.glob("rank-0-*")))
    return act


def empty_file(path):
    path.write_bytes(b"")


def cut(path):
    os.truncate(path, 100)


# What is done to the last checkpoint, and what `verify` says.
DAMAGES = [
    ("index missing", "index.json", remove, r"there is no checkpoint|has no index"),
    ("index a pipe", "index.json", replace(pipe), r"there is no checkpoint"),
    ("index a link to itself", "index.json", replace(lambda path: path.symlink_to("index.json")), r"there is no checkpoint"),
    ("index of a terabyte", "index.json", replace(sparse), r"index\.json|cannot map"),
    ("index deep", "index.json", lambda path: path.write_text("[" * 100000), r"nested more than"),
    ("index empty", "index.json", empty_file, r"index\.json is not JSON"),
    ("a shape that wraps to nothing", "index.json", index(tensor([1 << 32, 1 << 32])), r"more elements than can be counted"),
    ("a part that wraps", "index.json", index(tensor([1 << 32, 1 << 32], [[1 << 32, 1 << 32]])), r"more elements than can be counted"),
    ("a part larger than its file", "index.json", index(tensor([1 << 40], [[1 << 40]])), r"cannot be in rank-0-\d+\.safetensors, which has \d+ bytes"),
    ("a part outside of the whole", "index.json", index(lambda content: part(content).update(offsets=[(1 << 63) - 4], sizes=[8])), r"index\.json"),
    ("parts that are missing", "index.json", index(tensor([8])), r"its parts have 0 elements together"),
    ("a name that leads out", "index.json", index(lambda content: content["files"].update({"../x": 1})), r"cannot be called"),
    ("another format", "index.json", index(lambda content: content.update(format="x")), r'has the format "x"'),
    ("ranks' file missing", "index.json", ranks_file(remove), r"is missing, or no regular file"),
    ("ranks' file a pipe", "index.json", ranks_file(replace(pipe)), r"is missing, or no regular file"),
    ("ranks' file a folder", "index.json", ranks_file(replace(None)), r"is missing, or no regular file"),
    ("ranks' file a link to nowhere", "index.json", ranks_file(replace(dangling)), r"is missing, or no regular file"),
    ("ranks' file of a terabyte", "index.json", ranks_file(replace(sparse)), r"is damaged: it has 1099511627776 bytes instead of"),
    ("ranks' file cut", "index.json", ranks_file(cut), r"is damaged: it has 100 bytes instead of"),
    ("ranks' file damaged", "index.json", ranks_file(damage), r"is damaged|is not JSON|safetensors"),
    ("manifest damaged", "manifest.json", damage, r"manifest\.json is damaged"),
    ("manifest missing", "manifest.json", remove, r"cannot read .*manifest\.json"),
    ("manifest a pipe", "manifest.json", replace(pipe), r"manifest\.json.*not a regular file"),
]


def only_some_started(folder):
    """The launcher stopped starting ranks when the first had failed."""
    ended = sum(map(int, re.search(r"others +(\d+) ended well, (\d+) stopped", (folder / "said").read_text()).groups()))
    return None if ended < 900 else f"{ended} more were started"


def no_leftovers(folder):
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    return f"left: {left}" if left else None


def rows():
    found = [Row(f"commands/checkpoint verify: {name}", ["checkpoint", "verify", LAST], trained=True, files={f"{LAST}/{file}": change}, says=(says,), within=20)
             for name, file, change, says in DAMAGES]
    for action in "show", "merge", "convert":
        words = ["checkpoint", action, LAST] + ([] if action == "show" else ["out"])
        found += [
            Row(f"commands/checkpoint {action}: a part larger than its file", words, trained=True, says=("cannot be in rank-0",), check=no_leftovers,
                files={f"{LAST}/index.json": index(tensor([1 << 40], [[1 << 40]]))}, within=20),
            Row(f"commands/checkpoint {action}: index a pipe", words, trained=True, files={f"{LAST}/index.json": replace(pipe)}, within=20, check=no_leftovers,
                says=(r"there is no checkpoint|has neither",)),
        ]
        for name, content in (("a file", "x"), ("a pipe", pipe), ("nowhere", dangling)):
            found.append(Row(f"commands/checkpoint {action} of {name}", ["checkpoint", action, "f", *words[3:]], files={"f": content}, says=("'f' is no folder",), within=10))
    for action in "merge", "convert":
        for name, content in (("a file", "mine"), ("a pipe", pipe), ("a link to nowhere", dangling)):
            found.append(Row(f"commands/checkpoint {action} to {name}", ["checkpoint", action, "run", "out"], trained=True, files={"out": content},
                             says=("'out' is there already",)))
        found += [
            Row(f"commands/checkpoint {action} to a folder with something in it", ["checkpoint", action, "run", "out"], trained=True, files={"out/notes": "mine"},
                says=("'out' is there already",)),
            Row(f"commands/checkpoint {action} to an empty folder", ["checkpoint", action, "run", "out/"], trained=True, files={"out": None}, status=0,
                may_make="out/.*", says=("out/?: ",), check=no_leftovers),
            Row(f"commands/checkpoint {action} to no name", ["checkpoint", action, "run", ""], trained=True, says=("no name for a folder",)),
            # The next try is not in the way of what failed.
            Row(f"commands/checkpoint {action} on a full disk", files={"disk": None}, trained=True, needs=no_namespaces, status=0,
                shell=on_small_disk(16, f"$C checkpoint {action} ../run out && exit 9; ls -A; mount -o remount,size=9000k . && $C checkpoint {action} ../run out && "
                                    "$C checkpoint verify out"),
                says=("No space left on device", "out: .* tensors .*all is well"), never_says=(r"\n\.out\.", "is there already")),
            Row(f"commands/checkpoint {action} to a full output", shell=f"$C checkpoint {action} run out >/dev/full", trained=True, status=4,
                says=("the output could not be written",), may_make="out(/.*)?", ci=False),
        ]
    found += [
        Row("commands/checkpoint of a name that is not UTF-8", ["checkpoint", "show", b"\xff\x1b"], says=(r"'\\xff\\x1b' is no folder",)),
        Row("commands/mesh of a name that is not UTF-8", ["mesh", b"\xff"], says=(r"found '\\xff'",)),
        Row("commands/a command that is not UTF-8", [b"\xff"], status=2, says=(r"no command '\\xff'",)),
        Row("commands/a mesh of more than can be counted", ["mesh", "4294967297x4294967297"], says=("expected sizes such as 2x4",)),
        Row("commands/checkpoint verify of a run", ["checkpoint", "verify", "run"], trained=True, status=0, says=("all is well",)),
        Row("commands/checkpoint verify with closed descriptors", shell="$C checkpoint verify run <&- >&- 2>&-", trained=True, status=0, ci=False),
        Row("commands/checkpoint of nothing", ["checkpoint"], status=2, says=("which one",)),

        Row("commands/recommender", [*LIKES, "--out", "run"], status=0, says=("on new data",), may_make=RUN_FILES, check=whole_lines),
        Row("commands/recommender where one was", shell=f"$C {' '.join(LIKES)} --out run >/dev/null || exit 9; cp run/metrics.jsonl before; "
            f"$C {' '.join(LIKES)} --out run; echo second $?; cmp before run/metrics.jsonl && echo same", status=0, says=("there is a run in run already", "second 1", "same"),
            may_make=RUN_FILES + "|before"),
        Row("commands/recommender where a GPT was", [*LIKES, "--out", "run"], trained=True, says=("there is a run in run already",)),
        Row("commands/recommender to a file", [*LIKES, "--out", "x"], files={"x": "my notes"}, says=("--out x must be a folder.*nothing was changed",)),
        Row("commands/recommender to a pipe", [*LIKES, "--out", "x"], files={"x": pipe}, says=("--out x must be a folder",), within=10),
        Row("commands/recommender whose loss is not finite", [*LIKES, "--steps", "200", "--lr", "1000", "--max-restarts", "2", "--out", "run"], status=3,
            says=(r"step \d+: the loss is -?nan",), never_says=("starting again",), may_make=RUN_FILES),
        Row("commands/recommender larger than the machine", [*LIKES, "--items", "10000000", "--width", "4096", "--trainers", "100", "--out", "run"], within=20,
            says=(r"a table of 10000000 items of 4096 numbers takes \S+ GiB",)),
        Row("commands/recommender with no trainers", [*LIKES, "-n", "0"], status=2, says=("--trainers expects a whole number from 1 to 256, not 0",)),
        Row("commands/recommender of another number of ranks", ["run", "-n", "2", "sh", "-c", f"exec $C {' '.join(LIKES)} --trainers 4 --out run"], status=1,
            says=("there are 2 ranks; --trainers 4 needs 5",)),
        Row("commands/recommender on a full disk", shell=on_small_disk(8, f"$C {' '.join(LIKES)} --out run"), files={"disk": None}, needs=no_namespaces, status={1, 4},
            says=("No space left on device",)),
        Row("commands/recommender to a full output", shell=f"$C {' '.join(LIKES)} --out run >/dev/full", status=4, may_make=RUN_FILES, ci=False),
        Row("commands/recommender, interrupted", [*LIKES, "--steps", "1000000", "--out", "run"], act=interrupt(signal.SIGTERM), status=143, may_make=RUN_FILES,
            check=whole_lines),

        Row("commands/fully sharded to a file", [*SHARDED, "--steps", "2", "--out", "x"], files={"x": "my notes"}, says=("--out x must be a folder.*nothing was changed",)),
        Row("commands/fully sharded where a run was", [*SHARDED, "--steps", "2", "--out", "run"], trained=True, says=("there is a run in run already",)),
        Row("commands/fully sharded on a full disk", shell=on_small_disk(16, f"{FULLY} --steps 4"), files={"disk": None}, needs=no_namespaces, status=1,
            says=("No space left on device",)),
        # The checkpoints that there is room for are whole, and the run goes on from the last of them.
        Row("commands/fully sharded on a disk that fills up", files={"disk": None}, needs=no_namespaces, status=0, may_make="disk/.*", ci=False,
            shell=on_small_disk(1000, f"{FULLY} --steps 40 --epochs 50 --keep 1000 --checkpoint-every 1 && exit 9; mount -o remount,size=9000k . && "
                                "$C checkpoint verify run && $C train gpt --out run --resume --fsdp -n 2 --keep 3"),
            says=("No space left on device", "all is well", "going on behind step")),
        Row("commands/fully sharded, a killed rank", [*SHARDED, "--steps", "100000", "--epochs", "100000", "--checkpoint-every", "2", "--out", "run"],
            act=lambda running: (running.wait_for_file("run/checkpoints/step-*/manifest.json"), os.kill(running.ranks()[-1], signal.SIGKILL)), status=137,
            says=("rank 1 .*killed by SIGKILL",), may_make=RUN_FILES, check=whole_lines),
        Row("commands/fully sharded to a full output", shell=f"{FULLY} --steps 4 >/dev/full", status=4, says=("the output cannot be written|could not be written",),
            may_make=RUN_FILES, ci=False),
        Row("commands/fully sharded whose loss is not finite", [*SHARDED, "--lr", "1000000", "--clip", "0", "--optimizer", "sgd", "--steps", "60", "--epochs", "50",
            "--schedule", "constant", "--warmup", "0", "--max-restarts", "3", "--out", "run"], status=3, says=(r"step \d+: (the loss is|a gradient is not finite)",),
            never_says=("starting again",), may_make=RUN_FILES),
        Row("commands/hybrid without --fsdp", [*GPT.split(), "-n", "2", "--hybrid", "1x2"], says=(r"^chorale: \[train\] --hybrid says how --fsdp",)),
        Row("commands/hybrid of no replicas", [*SHARDED, "--hybrid", "0x2"], status={1, 2}, says=(r"--hybrid is replicas by ranks",), never_says=("failed: exit code",)),
        Row("commands/hybrid beyond", [*SHARDED, "--hybrid", "4294967297x2"], status={1, 2}, says=(r"--hybrid is replicas by ranks",), never_says=("failed: exit code",)),
        Row("commands/hybrid of other ranks", [*SHARDED, "--hybrid", "46341x46341"], status={1, 2}, says=(r"--hybrid 46341x46341 are 2147488281 ranks, but the job has 2",)),
        Row("commands/tp that does not divide", [*GPT.split(), "-n", "2", "--tp", "3"], says=(r"^chorale: \[train\] --tp 3 does not divide the 2 ranks",)),
        Row("commands/a device that is not there", [*GPT.split(), "-n", "1", "--device", "cuda:77"], says=("cuda",)),
        Row("commands/a device of no kind", [*GPT.split(), "-n", "1", "--device", "gpu"], says=("unknown device 'gpu'; expected cpu",)),

        Row("commands/a thousand ranks of which the first fails", shell="$C run -n 1000 false >said 2>&1; status=$?; tail -n 5 said; exit $status", status=1, may_make="said",
            says=("failed: exit code 1",), check=only_some_started),
        Row("commands/a thousand ranks, and a signal", shell="$C run -n 1000 sleep 100 & job=$!; until [ $(pgrep -c -P $job) -gt 2 ]; do sleep 0.02; done; "
            "kill -TERM $job; wait $job; echo status $?", status=0, says=("stopped by SIGTERM", "status 143"), within=30),
    ]
    for name in "metrics.jsonl", "report.html", "trace.json", "checkpoints":
        found.append(Row(f"commands/a new run where there is somebody's {name}", [*GPT.split(), "-n", "1", "--steps", "2", "--out", "x"], files={f"x/{name}": "mine"},
                         status=1, says=("there is a run in x already|should be a folder",)))
    found.append(Row("commands/resume where there are somebody's metrics and no run", [*GPT.split(), "-n", "1", "--steps", "2", "--out", "x", "--resume"],
                     files={"x/metrics.jsonl": "mine"}, says=("there is a run in x already: it has metrics.jsonl",)))
    found.append(Row("commands/a new run where the config of one was removed", [*GPT.split(), "-n", "1", "--steps", "2", "--out", "run"], trained=True,
                     files={"run/config.json": remove}, says=("there is a run in run already",)))
    found.append(Row("commands/somebody's notes in an old checkpoint", ["train", "gpt", "--out", "run", "--resume", "--steps", "12", "--checkpoint-every", "2", "--keep", "1",
                                                                       "--epochs", "50"],
                     trained=True, files={f"{LAST}/notes": "mine"}, status=0, may_change=RUN_FILES, may_make=RUN_FILES, may_go=r"run/checkpoints/step-00000002.*"))
    return found
