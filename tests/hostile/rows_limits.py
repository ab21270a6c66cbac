"""A machine that gives little: disks, memory, processes, folders that are not there."""
import os
import shutil
import subprocess

from harness import TINY, Row
from rows_runs import RUN_FILES, whole_lines

TRAIN = f"$C train gpt {' '.join(TINY)} --steps 4 --out run"


def no_namespaces():
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    return None if done.returncode == 0 else "mount namespaces cannot be made here"


def not_root():
    if os.getuid() != 0:
        return "only root can become somebody else"
    return None if shutil.which("setpriv") else "no setpriv"


# The output is no file: it goes through a pipe.
def with_files_of(kib, script):
    return f"(ulimit -f {kib}; {script}) 2>&1 | cat; exit ${{PIPESTATUS[0]}}"


# Runs the script in a file system of so many KiB.
def on_small_disk(kib, script):
    return f"exec unshare -m bash -c 'mount -t tmpfs -o size={kib}k none disk && cp text disk && cd disk || exit 9; {script}'"


def rows():
    return [
        Row("limits/files of nothing", shell=with_files_of(0, f"{TRAIN} -n 1"), status=1, says=("File too large|too large",), may_make=RUN_FILES),
        Row("limits/files of 8 KiB", shell=with_files_of(8, f"{TRAIN} -n 1"), status={0, 1}, may_make=RUN_FILES, never_says=("terminate",)),
        Row("limits/files of 8 KiB, two ranks", shell=with_files_of(8, f"{TRAIN} -n 2"), status={0, 1}, may_make=RUN_FILES, ci=False),
        Row("limits/a disk of 16 KiB", shell=on_small_disk(16, f"{TRAIN} -n 1"), files={"disk": None}, status=1, says=("No space left on device",), needs=no_namespaces),
        Row("limits/a disk that is full for a while", files={"disk": None}, needs=no_namespaces, status=0, within=60,
            shell=on_small_disk(8000, f"{TRAIN} --steps 8000 --epochs 1000 --checkpoint-every 0 -n 1 --evaluate-every 8000 >../out 2>../err & job=$!; "
                                "while [ ! -e run/metrics.jsonl ]; do sleep 0.02; done; dd if=/dev/zero of=fill bs=1k 2>/dev/null; sleep 1; rm fill; wait $job; "
                                "status=$?; mkdir -p ../run; cp run/metrics.jsonl ../run/; cat ../err; exit $status"),
            says=(r"cannot write run/(metrics\.jsonl|events\S*): No space left on device; what belongs there is kept",), may_make=r"run(/.*)?|out|err|disk/.*",
            check=whole_lines),
        Row("limits/a read-only folder", shell="exec unshare -m bash -c 'mount --bind ro ro && mount -o remount,ro,bind ro && " + TRAIN.replace("--out run", "--out ro/run") + " -n 1'",
            files={"ro": None}, says=("Read-only file system",), needs=no_namespaces),
        Row("limits/memory", shell=f"ulimit -v 400000; {TRAIN} -n 1 --width 2048 --context 16", status={1, 2, 126, 127}, may_make=RUN_FILES, never_says=("terminate",), ci=False),
        Row("limits/twenty descriptors", shell=f"ulimit -n 20; {TRAIN} -n 2", status={0, 1, 126}, may_make=RUN_FILES, ci=False),
        Row("limits/seven descriptors", shell="ulimit -n 7; $C run -n 2 true", status={0, 1, 126}),
        Row("limits/processes", shell="chmod -R a+rwX . ..; exec setpriv --reuid 65534 --clear-groups bash -c 'ulimit -u 1; exec $C run -n 2 true'", status={1, 126}, needs=not_root,
            says=(r"a thread could not be started: .*ulimit -u|cannot start .*ulimit -u|ranks are more than the 1 processes",)),
        Row("limits/more ranks than the machine holds: train", shell=f"{TRAIN} -n 65536 --batch 65536", says=(r"65536 ranks (take|are more)",), within=20),
        Row("limits/more ranks than the machine holds: run", ["run", "-n", "65536", "true"], says=(r"65536 ranks (take|are more)",), within=20),
        *[Row(f"limits/a world of {value}", ["train", "gpt", *TINY, "--steps", "2", "--out", "run"], env={"RANK": "0", "WORLD_SIZE": value},
              says=(rf"WORLD_SIZE is '{value}'; it takes a whole number from 1 to 1000000",), within=20) for value in ("4294967297", "x", "0", "-2")],
        *[Row(f"limits/a timeout of {value}", shell=f"{TRAIN} -n 2", env={"CHORALE_TIMEOUT": value},
              says=(rf"chorale: \[group\] CHORALE_TIMEOUT is '{value}'; it takes a number of seconds",), never_says=(r"chorale: \n", "rank 1"), within=20)
          for value in ("0", "-1", "soon")],
        Row("limits/threads", shell="chmod -R a+rwX . ..; exec setpriv --reuid 65534 --clear-groups bash -c 'ulimit -u 1; exec $C watch run --port 0'", trained=True,
            status=1, needs=not_root, says=(r"chorale: a thread could not be started: .*ulimit -u",), within=10),
        Row("limits/no TMPDIR", shell="$C run -n 2 true", env={"TMPDIR": "/nonexistent"}, status=0),
        Row("limits/no TMPDIR, and a rank that fails", shell="$C run -n 2 false", env={"TMPDIR": "/nonexistent"}, status=1, says=("exit code 1",)),
        Row("limits/no TMPDIR in training", shell=f"{TRAIN} -n 2", env={"TMPDIR": "/nonexistent"}, status=0, may_make=RUN_FILES),
        Row("limits/no working folder: train", shell="mkdir gone; cd gone; rmdir ../gone; $C train gpt --text ../text -n 1", status=1, says=("No such file or directory",)),
        Row("limits/no working folder: run", shell="mkdir gone; cd gone; rmdir ../gone; $C run -n 2 true", status={0, 1, 126}, never_says=("terminate",)),
        Row("limits/no working folder: report", shell="mkdir gone; cd gone; rmdir ../gone; $C report .", status=1),
        Row("limits/no environment", shell="env -i $C doctor", status=0),
        Row("limits/a language that is not there", shell="$C ops add", env={"LC_ALL": "xx_XX.UTF-8"}, status=0),
        Row("limits/threads of nonsense", shell=f"{TRAIN} -n 1", env={"OMP_NUM_THREADS": "many"}, status=0, may_make=RUN_FILES),
        Row("limits/a debug level of nonsense", ["run", "-n", "1", "true"], env={"CHORALE_DEBUG": "LOUD"}, status={0, 1, 2}),
        Row("limits/a debug level of nonsense in training", shell=f"{TRAIN} -n 2", env={"CHORALE_DEBUG": "LOUD"}, status=1, may_make=RUN_FILES,
            says=(r"CHORALE_DEBUG is 'LOUD'; it takes OFF, INFO or DETAIL",)),
        Row("limits/a rank of nonsense", ["train", "gpt", *TINY, "--steps", "2"], env={"RANK": "x", "WORLD_SIZE": "2"}, status=1, says=("RANK",)),
        Row("limits/a rank beyond its world", ["train", "gpt", *TINY, "--steps", "2"], env={"RANK": "5", "WORLD_SIZE": "2"}, status=1, says=("RANK|rank",)),
        Row("limits/chaos of nonsense", ["run", "-n", "1", "true"], env={"CHORALE_CHAOS": "explode@rank=0"}, status={1, 2}, says=("explode|chaos",)),
        Row("limits/a fabric of nonsense", ["run", "-n", "1", "true"], env={"CHORALE_FABRIC": "pigeon"}, status=2, says=("'pigeon' is no fabric",)),
        Row("limits/a fabric of nonsense: doctor", ["doctor"], env={"CHORALE_FABRIC": "pigeon"}, status=1, says=("CHORALE_FABRIC: 'pigeon' is no fabric",)),
        *[Row(f"limits/{variable} of nonsense", ["run", "-n", "1", "true"], env={variable: "2"}, status=status, says=(variable,))
          for variable, status in (("CHORALE_CHECKSUM", 2), ("CHORALE_MPS", 1))],
        Row("limits/a secret of nonsense", ["run", "-n", "1", "true"], env={"CHORALE_SECRET_FILE": "nowhere"}, status=1, says=("nowhere",)),
    ]
