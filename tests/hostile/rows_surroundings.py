"""What a shell, a service or a batch system hands on: closed descriptors, ignored signals, ports and variables of others.

`$B/examples/collectives` stands for programs of users that only link the library.
"""
import os
import signal

from harness import TINY, Row
from rows_limits import no_namespaces, on_small_disk
from rows_runs import RUN_FILES, whole_lines

TRAIN = f"$C train gpt {' '.join(TINY)} --steps 4 --out run"
LONG = f"$C train gpt {' '.join(TINY)} --steps 400 --epochs 1000 --checkpoint-every 0 --out run"
LINKED = "$B/examples/collectives"
# The variables of ranks without a launcher, at a port that no other row has.
RANK = "RANK=%d WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=%d "
ALONE, TRAIN_ALONE = RANK + LINKED, RANK + TRAIN
CLOSED = (("input", "<&-"), ("output", ">&-"), ("errors", "2>&-"), ("all", "<&- >&- 2>&-"))
# Waits until both ranks are up, does something, and lets them end.
WAITING = """sh -c 'touch up_$RANK; while [ ! -e end ]; do sleep 0.05; done'"""
UP = "until [ -e up_0 ] && [ -e up_1 ]; do kill -0 $job || exit 9; sleep 0.05; done; "
MADE = r"up_\d|end"


def port(number):
    return 20000 + (os.getpid() * 16 + number) % 12000


def pair(number, redirected):
    """Two ranks, both with the same descriptors."""
    ranks = "".join(f"{ALONE % (rank, port(number))} {redirected} & p{rank}=$!; " for rank in (0, 1))
    return ranks + "wait $p0; s0=$?; wait $p1; echo statuses $s0 $?"


def in_background_of_terminal(command):
    """As a job of an interactive shell does it; with its status."""
    return f"""script -qec "bash -c 'stty tostop; set -m; {command} & wait \\$!; echo status \\$?'" /dev/null"""


def signalled(number):
    def act(running):
        running.wait_for_file("run/metrics.jsonl")
        running.process.send_signal(number)
    return act


def stop(number):
    """To the process of the row, once both ranks are up; then they may end."""
    def act(running):
        running.wait_for(lambda: (running.folder / "up_0").exists() and (running.folder / "up_1").exists(), "both ranks were up")
        running.process.send_signal(number)
        (running.folder / "end").touch()
    return act


def rows():
    found = []
    for number, (name, redirected) in enumerate(CLOSED):
        found += [
            Row(f"surroundings/{name} closed: doctor", shell=f"$C doctor {redirected}", status=0, ci=name == "all"),
            Row(f"surroundings/{name} closed: train", shell=f"{TRAIN} -n 1 {redirected}", status=0, may_make=RUN_FILES, check=whole_lines, ci=name == "all"),
            Row(f"surroundings/{name} closed: train of two ranks", shell=f"{TRAIN} -n 2 {redirected}", status=0, may_make=RUN_FILES, check=whole_lines,
                ci=name == "output"),
            Row(f"surroundings/{name} closed: resume", shell=f"$C train gpt --out run --resume --steps 6 {redirected}", trained=True, status=0, may_change=RUN_FILES,
                may_make=RUN_FILES, check=whole_lines, ci=False),
            Row(f"surroundings/{name} closed: generate", shell=f"$C generate --run run --tokens 5 {redirected}", trained=True, status=0, ci=name == "output"),
            Row(f"surroundings/{name} closed: a program of a user's", shell=f"$C run -n 2 {LINKED} {redirected}", status=0, ci=name == "output"),
            Row(f"surroundings/{name} closed: a program of a user's without a launcher", shell=pair(number, redirected), status=0, says=("statuses 0 0",)),
        ]
    found += [
        Row("surroundings/a second reader's descriptor is left alone", shell="exec 3<text 4>other; " + pair(8, "") + "; read -u 3 word; echo word $word; echo mine >&4; "
            "[ $(cat other) = mine ] && echo whole", status=0, says=("statuses 0 0", "word the cat", "whole"), may_make="other"),

        Row("surroundings/nohup: run", shell=f"trap '' HUP; exec $C run -n 2 {WAITING}", act=stop(signal.SIGHUP), status=0, may_make=MADE),
        Row("surroundings/ignored Ctrl-C: run", shell=f"trap '' INT; exec $C run -n 2 {WAITING}", act=stop(signal.SIGINT), status=0, may_make=MADE),
        Row("surroundings/ignored SIGTERM: run", shell=f"trap '' TERM; exec $C run -n 2 {WAITING}", act=stop(signal.SIGTERM), status=0, may_make=MADE, ci=False),
        Row("surroundings/nohup: train", shell=f"trap '' HUP; exec {LONG} -n 1", act=signalled(signal.SIGHUP), status=0, never_says=("interrupted",), may_make=RUN_FILES,
            check=whole_lines),
        Row("surroundings/ignored Ctrl-C: train", shell=f"trap '' INT; exec {LONG} -n 1", act=signalled(signal.SIGINT), status=0, never_says=("interrupted",),
            may_make=RUN_FILES, check=whole_lines, ci=False),
        Row("surroundings/ignored Ctrl-C: train of two ranks", shell=f"trap '' INT; exec {LONG} -n 2", act=signalled(signal.SIGINT), status=0, never_says=("interrupted",),
            may_make=RUN_FILES, check=whole_lines, ci=False),
        Row("surroundings/Ctrl-C of a program of a user's", shell=f"$C run -n 2 bash -c 'trap \"exit 7\" INT; touch up_$RANK; {LINKED}; while :; do sleep 0.05; done' & job=$!; "
            f"{UP} kill -TERM $job; wait $job; echo status $?", status=0, says=(r"status 143",), may_make=MADE, ci=False),

        Row("surroundings/ignored SIGCHLD: run", shell="trap '' CHLD; exec $C run -n 2 true", status=0, within=20),
        Row("surroundings/ignored SIGCHLD: a rank that fails", shell="trap '' CHLD; exec $C run -n 2 false", status=1, says=("exit code 1",), within=20),
        Row("surroundings/ignored SIGCHLD: train of two ranks", shell=f"trap '' CHLD; exec {TRAIN} -n 2", status=0, may_make=RUN_FILES, check=whole_lines, within=30),
        *[Row(f"surroundings/a terminal that stops writers of the background: {name}", shell=in_background_of_terminal(command), status=0, may_make=RUN_FILES,
              says=("status 0",), within=40) for name, command in (("run", "$C run -n 2 echo hello"), ("train", f"{TRAIN} -n 1"))],

        # Programs that only link the library: what a shell or a disk does to them is theirs, and the library's part of it does no harm.
        Row("surroundings/SIGTERM ends a user's rank that waits", shell=f"{ALONE % (0, port(13))} & p=$!; sleep 1; kill -TERM $p; wait $p; echo status $?", status=0,
            says=("status 143",), within=20),
        Row("surroundings/ignored SIGTERM leaves a user's rank alone", shell=f"trap '' TERM; CHORALE_TIMEOUT=3 {ALONE % (0, port(14))} & p=$!; sleep 1; kill -TERM $p; "
            "wait $p; echo status $?", status=0, says=("in vain",), never_says=("status 143",), within=30, ci=False, may_abort=True),
        Row("surroundings/a user's program, and no TMPDIR", shell=f"$C run -n 2 {LINKED}", env={"TMPDIR": "/nonexistent"}, status=0, says=("half of 1",)),
        Row("surroundings/a user's program in a folder that is gone", shell=f"mkdir gone; cd gone; rmdir ../gone; $C run -n 2 {LINKED}", status=0, says=("half of 1",)),
        Row("surroundings/a user's program with few descriptors", shell=f"ulimit -n 12; $C run -n 2 {LINKED}", status={0, 1, 126, 134}, ci=False, may_abort=True),
        # The other rank may get its error, which the program does not catch, before the launcher ends it.
        Row("surroundings/a user's rank dies, and the folder of records is full", files={"disk": None}, needs=no_namespaces, status=137, within=20, may_abort=True,
            shell=on_small_disk(4, f"dd if=/dev/zero of=fill bs=4k 2>/dev/null; CHORALE_FLIGHT_DIR=$PWD $C run -n 2 --chaos kill@rank=1,call=3 {LINKED}"),
            says=("rank 1 on .* killed by SIGKILL",)),
        Row("surroundings/a user's rank dies, and there is no folder of records", shell=f"$C run -n 2 --chaos kill@rank=1,call=3 {LINKED}",
            env={"CHORALE_FLIGHT_DIR": "/nonexistent"}, status=137, says=("rank 1 on .* killed by SIGKILL",), within=20, may_abort=True),
        Row("surroundings/a user's program that saves on a full disk", files={"disk": None}, needs=no_namespaces, status={134, -6}, may_abort=True,
            shell=on_small_disk(8, "TMPDIR=$PWD exec $B/examples/checkpoints"), says=(r"cannot write .*model\.safetensors.*: No space left on device",)),
        # Every name that a record could have, had it none that is unpredictable, leads to a file of somebody else.
        Row("surroundings/a user's rank dies, and links are in the place of its record", files={"records": None, "victim": "mine"}, status=0, within=30,
            shell=f"for rank in 0 1; do (for n in 0 1 2; do ln -s ../victim records/chorale-flight-$BASHPID-$n-rank$rank.json; done; "
            f"export CHORALE_FLIGHT_DIR=$PWD/records CHORALE_CHAOS=kill@rank=1,call=3; exec env RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port(15)} {LINKED}) & "
            "done; wait; [ -n \"$(find records -type f)\" ] && echo recorded", says=("recorded",), may_make="records/.*",
            may_abort=True),
        Row("surroundings/a user's program whose reader goes", shell=f"$C run -n 2 sh -c 'while :; do {LINKED}; done' | head -n 1; echo status ${{PIPESTATUS[0]}}", status=0,
            says=(r"status (141|1)\n",), within=30, ci=False),

        Row("surroundings/nobody reads, and a signal comes", shell="$C run -n 1 yes | (sleep 2; kill -TERM $(pgrep -P $$ -x chorale); sleep 3; cat >/dev/null); "
            "echo status ${PIPESTATUS[0]}", status=0, says=("status 143",), within=30, ci=False),
        Row("surroundings/a batch script of Slurm's is no rank", shell=f"{TRAIN} -n 1", env={"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NODEID": "0"},
            status=0, may_make=RUN_FILES),
        Row("surroundings/an old restart count does not resume", shell=f"{TRAIN} -n 1", trained=True, env={"TORCHELASTIC_RESTART_COUNT": "3"}, status=1,
            says=("there is a run in run already",)),
        Row("surroundings/nobody comes: a rank", shell=f"CHORALE_TIMEOUT=6 {TRAIN_ALONE % (0, port(9))}", within=30,
            says=(r"rank 0 of 2 waits at 127\.0\.0\.1:\d+ \(unix:\S+\) for rank 1", r"waited 6 s for rank 1 of 2 in vain")),
        Row("surroundings/nobody comes: the second rank", shell=f"CHORALE_TIMEOUT=6 {TRAIN_ALONE % (1, port(10))}", within=30,
            says=(r"info: .*rank 1 of 2 looks for rank 0 at 127\.0\.0\.1:\d+: .*unix:chorale-\d+-\d+",
                  r"chorale: .*rank 1 of 2 looks for rank 0 at 127\.0\.0\.1:\d+: .*is its rank \(or launcher\) running")),
        Row("surroundings/nobody comes: a node", shell=f"openssl rand -hex 32 >secret; chmod 600 secret; CHORALE_SECRET_FILE=secret timeout 6 $C run -n 1 --nnodes 2 "
            f"--node-rank 0 --rdzv 127.0.0.1:{port(11)} true", status=124, says=(r"node 0 waits at 127\.0\.0\.1:\d+ for node 1 of 2",), may_make="secret"),
        Row("surroundings/a server that says nothing, where the store should be", shell="openssl rand -hex 32 >secret; chmod 600 secret; "
            f"python3 -c 'import socket, time; s = socket.create_server((\"127.0.0.1\", {port(16)})); time.sleep(100)' & server=$!; "
            f"CHORALE_SECRET_FILE=secret CHORALE_TIMEOUT=5 {TRAIN_ALONE % (1, port(16))}; status=$?; kill $server; exit $status", within=30, may_make="secret",
            says=(r"info: .*rank 1 of 2 looks for rank 0 at 127\.0\.0\.1:\d+: .*is it a server of this job, and has this rank the same secret",
                  r"chorale: .*rank 1 of 2 looks for rank 0 at 127\.0\.0\.1:\d+")),
        Row("surroundings/two jobs at one port", shell=f"export CHORALE_TIMEOUT=8; TORCHELASTIC_RUN_ID=one {TRAIN_ALONE % (0, port(12))} & "
            f"sleep 2; TORCHELASTIC_RUN_ID=two {TRAIN_ALONE % (1, port(12))}; echo second $?; wait %1; echo first $?", status=0,
            says=(r"belong to another job: its run is 'one' \(process \d+ on \S+\), this one's is 'two'", r"second [1-9]", r"first [1-9]"), within=30),
    ]
    return found
