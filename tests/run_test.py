#!/usr/bin/env python3
"""`chorale run` from the outside: variables, output, failures, signals, restarts, and nothing left behind.

  run_test.py BIN      BIN is the folder of the built programs
"""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from processes import LIMIT_S, alive, has_taken, wait_until
from unittest_main import main

BIN = pathlib.Path(sys.argv.pop(1)).resolve()
CHORALE = str(BIN / "chorale")
# Prints a line with what it got from the others through the store.
MEET = [str(BIN / "transport_test"), "--gtest_also_run_disabled_tests", "--gtest_filter=RankOfALauncher.*"]
# Makes twenty calls with the others.
WORK = [str(BIN / "comm_test"), "--gtest_also_run_disabled_tests", "--gtest_filter=RankOfALauncher.*"]


def sh(script):
    return ["sh", "-c", script]


def start(arguments, **options):
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    return subprocess.Popen([CHORALE, "run", *arguments], text=True, **options)


def run(*arguments, **options):
    process = start(arguments, **options)
    try:
        process.out, process.err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process


class Scratch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def pids(self, count):
        """Of processes that write them, one in each file pid_*."""
        files = []

        def there():
            files[:] = sorted(f for f in self.folder.glob("pid_*") if f.read_text().endswith("\n"))
            return len(files) == count

        wait_until(there, f"{count} processes")
        return [int(f.read_text()) for f in files]

    def write_pid(self):
        return f"echo $$ >{self.folder}/pid_$RANK; "


class Success(Scratch):
    def test_each_rank_gets_torchruns_variables(self):
        names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR "
                 "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS")
        result = run("-n", "3", *sh("echo " + " ".join(f"${name}" for name in names.split())))
        self.assertEqual(result.returncode, 0, result.err)
        self.assertEqual(sorted(result.out.splitlines()),
                         [f"[{rank}] {rank} {rank} 3 3 0 127.0.0.1 0 0" for rank in range(3)])
        self.assertEqual(result.err, "")

    def test_ranks_get_the_fabric(self):
        result = run("-n", "1", "--fabric", "tls", *sh("echo $CHORALE_FABRIC"))
        self.assertEqual((result.returncode, result.out), (0, "[0] tls\n"), result.err)

    def test_a_fabric_that_cannot_be_is_an_error_before_anything_starts(self):
        for fabric, reason in (("gloo", "'gloo' is no fabric; there are tls, ucx, ucx:DEVICE and mpi"),
                               ("mpi", "CHORALE_FABRIC=mpi mpirun -n 1 PROGRAM ARGS...")):
            result = run("-n", "1", "--fabric", fabric, *sh("echo started"))
            self.assertEqual(result.returncode, 2)
            self.assertIn(reason, result.err)
            self.assertNotIn("started", result.out)

    def test_ranks_meet_in_the_launchers_store(self):
        result = run("-n", "3", *MEET)
        self.assertEqual(result.returncode, 0, result.out + result.err)
        places = "".join(f" | 127.0.0.1 {rank} of 3" for rank in range(3))
        for rank in range(3):
            self.assertIn(f"[{rank}] rank {rank} of 3:{places}\n", result.out)

    def test_ranks_meet_without_a_launcher_by_variables(self):
        ranks = [subprocess.Popen(MEET, stdout=subprocess.PIPE, text=True,
                                  env=dict(os.environ, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                                           MASTER_PORT=str(20000 + os.getpid() % 10000)))
                 for rank in (1, 0)]
        for process in ranks:
            out, _ = process.communicate(timeout=LIMIT_S)
            self.assertIn("of 2: | 127.0.0.1 0 of 2 | 127.0.0.1 1 of 2\n", out)
            self.assertEqual(process.returncode, 0)

    @unittest.skipUnless(os.geteuid() == 0, "only root can be two users")
    def test_without_a_secret_another_user_is_refused(self):
        port = str(30000 + os.getpid() % 10000)
        environment = dict(os.environ, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

        def rank(number):
            return subprocess.Popen(MEET, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                    env=dict(environment, RANK=str(number)))

        first = rank(0)
        code = ("import socket, sys, time\n"
                "s = socket.socket(socket.AF_UNIX)\n"
                "for _ in range(300):\n"
                "  try: s.connect(sys.argv[1].encode().replace(b'@', bytes(1))); break\n"
                "  except ConnectionRefusedError: time.sleep(0.05)\n"
                "try: s.sendall(bytes(100)); print(s.recv(1))\n"
                "except OSError: print(b'')\n")
        stranger = subprocess.run(["/usr/bin/python3", "-c", code, f"@chorale-0-{port}"], user=65534, text=True,
                                  stdout=subprocess.PIPE, timeout=LIMIT_S)
        self.assertEqual(stranger.stdout, "b''\n")
        second = rank(1)
        out, err = first.communicate(timeout=LIMIT_S)
        self.assertIn("refused a connection of another user", err)
        self.assertEqual(first.returncode, 0, out + err)
        second.communicate(timeout=LIMIT_S)
        self.assertEqual(second.returncode, 0)

    @unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
    def test_ranks_meet_under_open_mpi_with_nothing_set(self):
        result = subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *MEET], text=True,
                                stdout=subprocess.PIPE, timeout=LIMIT_S)
        for rank in range(2):
            self.assertIn(f"rank {rank} of 2: | 127.0.0.1 0 of 2 | 127.0.0.1 1 of 2\n", result.stdout)

    def test_the_master_port_is_free_and_the_same_for_all(self):
        code = "import os, socket; p = int(os.environ['MASTER_PORT']); os.environ['RANK'] == '0' and socket.socket().bind(('127.0.0.1', p)); print(p)"
        result = run("-n", "3", sys.executable, "-c", code)
        self.assertEqual(result.returncode, 0, result.err)
        self.assertEqual(len({line.split()[1] for line in result.out.splitlines()}), 1)

    def test_the_secret_is_in_a_descriptor_and_nowhere_else(self):
        code = ("import os; s = os.pread(int(os.environ['CHORALE_SECRET_FD']), 100, 0); "
                "e = open('/proc/self/environ', 'rb').read() + open('/proc/self/cmdline', 'rb').read(); "
                "print(len(s), s in e, s.hex().encode() in e)")
        result = run("-n", "1", sys.executable, "-c", code)
        self.assertEqual(result.out, "[0] 32 False False\n")

    def test_lines_stay_whole_and_keep_their_stream(self):
        code = ("import os, sys\n"
                "for i in range(300):\n"
                "  for c in 'abcdefghij': os.write(1, (c * 30).encode())\n"
                "  os.write(1, b'\\n')\n"
                "os.write(2, b'to errors\\nwithout an end')\n")
        result = run("-n", "4", sys.executable, "-c", code)
        whole = "".join(c * 30 for c in "abcdefghij")
        self.assertEqual(sorted(result.out.splitlines()), sorted(f"[{r}] {whole}" for r in range(4) for _ in range(300)))
        self.assertEqual(sorted(result.err.splitlines()),
                         sorted([f"[{r}] to errors" for r in range(4)] + [f"[{r}] without an end" for r in range(4)]))

    def test_log_dir_has_a_file_for_each_rank(self):
        folder = self.folder / "new" / "logs"
        result = run("-n", "2", "--log-dir", str(folder), *sh("echo out $RANK; echo err $RANK >&2"))
        self.assertEqual(result.returncode, 0, result.err)
        for rank in range(2):
            self.assertEqual(sorted((folder / f"rank_{rank}.log").read_text().splitlines()), [f"err {rank}", f"out {rank}"])

    def test_arguments_after_the_program_are_the_programs(self):
        result = run("-n", "1", "echo", "-n", "--nnodes", "--", "--help", "a b")
        self.assertEqual(result.out, "[0] --nnodes -- --help a b\n", result.err)

    def test_standard_input_is_empty(self):
        result = run("-n", "2", "cat", stdin=subprocess.PIPE)
        self.assertEqual((result.returncode, result.out), (0, ""))

    def test_ranks_are_bound_to_cores_and_told_their_threads(self):
        code = "import os; print(len(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
        cores = len(os.sched_getaffinity(0))
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        result = run("-n", "1", sys.executable, "-c", code, env=environment)
        self.assertEqual(int(result.out.split()[1]), cores)
        if cores >= 2:
            result = run("-n", "2", sys.executable, "-c", code, env=environment)
            self.assertLess(max(int(line.split()[1]) for line in result.out.splitlines()), cores)
        environment["OMP_NUM_THREADS"] = "7"
        self.assertTrue(run("-n", "1", sys.executable, "-c", code, env=environment).out.endswith(" 7\n"))


class Chaos(Scratch):
    def work(self, *arguments):
        return run("-n", "2", *arguments, *WORK, env=dict(os.environ, CHORALE_FLIGHT_DIR=str(self.folder)))

    def test_a_plan_is_said_and_carried_out(self):
        plan = "delay@rank=0,call=3,ms=5;kill@rank=1,call=7"
        result = self.work("--chaos", plan)
        self.assertEqual(result.returncode, 128 + signal.SIGKILL, result.err)
        self.assertIn(f"chorale run: faults on purpose: {plan}\n", result.err)
        self.assertIn("rank 1 on ", result.err)
        self.assertIn("failed: killed by SIGKILL", result.err)

    def test_a_seed_makes_a_plan_which_is_said(self):
        result = self.work("--chaos", "1")
        self.assertEqual(result.returncode, 0, result.err)
        self.assertIn("faults on purpose: delay@rank=0,call=5,ms=10;short@rank=1", result.err)
        self.assertEqual(result.err.count("faults on purpose"), 1)

    def test_a_restart_is_without_faults(self):
        result = self.work("--chaos", "kill@rank=1,call=7", "--max-restarts", "1")
        self.assertEqual(result.returncode, 0, result.err)
        self.assertEqual(result.out.count("twenty calls"), 2)

    def test_damaged_control_messages_are_found_without_checksums_and_data_with_them(self):
        for arguments, what in ((["--chaos", "corrupt@rank=1,call=7"], "the control message of rank 1 "),
                                (["--checksum", "--chaos", "corrupt@rank=1,call=7,what=payload"], "the data of rank 1 ")):
            result = self.work(*arguments)
            self.assertNotEqual(result.returncode, 0)
            self.assertIn(what, result.out)

    def test_what_is_no_plan_is_an_error(self):
        result = self.work("--chaos", "kill@rank=2,call=1")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("rank is one of the job's", result.err)


# Does what the launcher and its ranks ask of NVIDIA's program: with -f a daemon, whose pipe "control" is in a folder, until
# another one of it reads "quit".
MPS = """#!/bin/sh
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
if [ "$1" = -f ]; then
  echo $$ >"$NOTES/pid_daemon"
  [ -e "$NOTES/refuses" ] && exit 1
  mkfifo control
  while read -r word <control; do [ "$word" = quit ] && { echo asked >"$NOTES/quit"; exit 0; }; done
else
  cat >control
fi
"""


class SharedGpu(Scratch):
    def setUp(self):
        super().setUp()
        program = self.folder / "nvidia-cuda-mps-control"
        program.write_text(MPS)
        program.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0",
                            "NOTES": str(self.folder)}
        for name in ("CHORALE_MPS", "CUDA_MPS_PIPE_DIRECTORY"):
            self.environment.pop(name, None)

    def run_ranks(self, count, script="echo in:$CUDA_MPS_PIPE_DIRECTORY", **variables):
        return run("-n", str(count), *sh(script), env={**self.environment, **variables})

    def test_ranks_run_under_a_daemon_that_ends_with_them(self):
        done = self.run_ranks(2, 'test -p "$CUDA_MPS_PIPE_DIRECTORY/control" && echo "in:$CUDA_MPS_PIPE_DIRECTORY"')
        self.assertEqual(done.returncode, 0, done.err)
        self.assertIn("2 ranks share 1 GPU under NVIDIA's MPS", done.err)
        folders = set(re.findall(r"in:(/tmp/chorale-mps-\w+)", done.out))
        self.assertEqual(len(folders), 1, done.out)
        self.assertFalse(pathlib.Path(folders.pop()).exists())
        self.assertTrue((self.folder / "quit").exists())
        self.assertFalse(alive(self.pids(1)[0]))

    def test_none_is_started_where_none_is_wanted(self):
        for count, variables in ((1, {}), (2, {"CUDA_VISIBLE_DEVICES": "0,1"}), (2, {"CUDA_VISIBLE_DEVICES": ""}),
                                 (2, {"CUDA_VISIBLE_DEVICES": "-1"}), (2, {"CHORALE_MPS": "0"})):
            done = self.run_ranks(count, **variables)
            self.assertEqual(done.returncode, 0, done.err)
            self.assertNotIn("MPS", done.err)
            self.assertEqual(set(re.findall("in:.*", done.out)), {"in:"}, variables)
        done = self.run_ranks(2, CUDA_MPS_PIPE_DIRECTORY="/of/the/user")
        self.assertEqual(re.findall("in:.*", done.out), ["in:/of/the/user"] * 2)
        self.assertFalse((self.folder / "pid_daemon").exists())

    def test_one_that_does_not_come_up_is_said_and_left_out(self):
        (self.folder / "refuses").touch()
        done = self.run_ranks(2)
        self.assertEqual(done.returncode, 0, done.err)
        self.assertRegex(done.err, "without MPS: .* did not come up")
        self.assertEqual(set(re.findall("in:.*", done.out)), {"in:"})

    def test_it_does_not_outlive_a_launcher_that_is_killed(self):
        process = start(["-n", "2", *sh('echo $$ >"$NOTES/rank_$RANK"; exec sleep 600')], env=self.environment)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        daemon = self.pids(1)[0]
        wait_until(lambda: len(list(self.folder.glob("rank_*"))) == 2, "two ranks")
        process.kill()
        wait_until(lambda: not alive(daemon), "the end of the daemon")


class CommandLine(unittest.TestCase):
    def test_what_is_wrong_is_said_and_status_2(self):
        for arguments, word in ((["true"], "-n"), (["-n", "2"], "PROGRAM"), (["-n", "0", "true"], "-n"),
                                (["-n", "x", "true"], "-n"), (["-n", "2", "--fabric", "gloo", "true"], "--fabric"),
                                (["-n", "2", "--chaos"], "--chaos")):
            result = run(*arguments)
            self.assertEqual(result.returncode, 2, arguments)
            self.assertIn(word, result.err, arguments)

    def test_a_missing_program_is_127(self):
        for name in ("no-such-program", "./no-such-program", "/etc/passwd"):
            result = run("-n", "2", name)
            self.assertEqual(result.returncode, 127)
            self.assertIn(name, result.err)
            self.assertEqual(len(result.err.splitlines()), 1, result.err)

    def test_a_file_that_cannot_be_executed_is_126(self):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "program"
            program.write_bytes(b"\x7fELF no")
            program.chmod(0o755)
            result = run("-n", "3", str(program))
            self.assertEqual(result.returncode, 126)
            self.assertIn("Exec format error", result.err)

    def test_several_nodes_need_a_place_and_a_secret(self):
        self.assertIn("--rdzv", run("-n", "1", "--nnodes", "2", "true").err)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CHORALE_SECRET")}
        result = run("-n", "1", "--nnodes", "2", "--rdzv", "127.0.0.1:1", "true", env=environment)
        self.assertEqual(result.returncode, 1)
        self.assertIn("CHORALE_SECRET_FILE", result.err)


class Failure(Scratch):
    def test_the_first_failure_stops_all_with_one_summary(self):
        began = time.monotonic()
        result = run("-n", "3", *sh(self.write_pid() + "test $RANK = 1 || exec sleep 100; sleep 0.3; echo oh no >&2; exit 7"))
        self.assertEqual(result.returncode, 7)
        self.assertLess(time.monotonic() - began, 8)
        self.assertEqual(result.err.count("chorale run:"), 1, result.err)
        self.assertRegex(result.err, r"rank 1 on \S+ failed: exit code 7")
        self.assertRegex(result.err, rf"pid +{self.pids(3)[1]}\n")
        self.assertRegex(result.err, r"last error +oh no\n")
        self.assertRegex(result.err, r"when +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d, \d+\.\d s after the start")
        self.assertRegex(result.err, r"others +0 ended well, 2 stopped\n")
        self.assertFalse(any(map(alive, self.pids(3))))

    def test_a_killed_rank_is_named_with_its_signal(self):
        process = start(["-n", "3", *sh(self.write_pid() + "exec sleep 100")])
        os.kill(self.pids(3)[2], signal.SIGKILL)
        _, err = process.communicate(timeout=LIMIT_S)
        self.assertEqual(process.returncode, 128 + signal.SIGKILL)
        self.assertRegex(err, r"rank 2 on \S+ failed: killed by SIGKILL")

    def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(self):
        result = run("-n", "2", "--grace", "0.5",
                     *sh("trap '' TERM; if [ $RANK = 1 ]; then until [ -e ignores ]; do sleep 0.01; done; exit 3; fi; "
                         "touch ignores; while true; do sleep 0.1; done"), cwd=self.folder)
        self.assertEqual(result.returncode, 3)
        self.assertIn("some with SIGKILL, 0.5 s after SIGTERM", result.err)

    def test_ranks_have_time_to_clean_up(self):
        script = "trap 'echo cleaned; exit 0' TERM; test $RANK = 0 || { sleep 0.5; exit 3; }; while true; do sleep 0.05; done"
        self.assertIn("[0] cleaned\n", run("-n", "2", *sh(script)).out)

    def test_a_stopped_rank_is_stopped_all_the_same(self):
        script = "test $RANK = 0 && kill -STOP $$; sleep 0.3; exit 4"
        self.assertEqual(run("-n", "2", "--grace", "2", *sh(script)).returncode, 4)

    def test_what_a_rank_leaves_in_its_group_is_killed(self):
        result = run("-n", "2", *sh(f"sleep 100 & echo $! >{self.folder}/pid_$RANK"))
        self.assertEqual(result.returncode, 0)
        self.assertFalse(any(map(alive, self.pids(2))))


class Signals(Scratch):
    def test_signals_to_stop_are_forwarded(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(number.name):
                name = number.name.removeprefix("SIG")
                process = start(["-n", "2", *sh(f"trap 'echo got {name}; exit 0' {name}; " + self.write_pid() +
                                               "while true; do sleep 0.05; done")])
                self.pids(2)
                process.send_signal(number)
                out, err = process.communicate(timeout=LIMIT_S)
                self.assertEqual(process.returncode, 128 + number)
                self.assertEqual(sorted(out.splitlines()), [f"[0] got {name}", f"[1] got {name}"])
                self.assertIn(f"stopped by SIG{name}", err)
                for file in self.folder.glob("pid_*"):
                    file.unlink()

    def test_the_second_signal_kills(self):
        process = start(["-n", "2", *sh("trap '' INT TERM; " + self.write_pid() + "while true; do sleep 0.05; done")])
        pids = self.pids(2)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: has_taken(process.pid, signal.SIGINT), "the first signal is heard")
        time.sleep(0.1)  # time to end at once, which would be wrong
        self.assertIsNone(process.poll())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
        self.assertEqual(process.returncode, 128 + signal.SIGINT)
        self.assertIn("SIGKILL, after a second signal, SIGINT", err)
        self.assertFalse(any(map(alive, pids)))

    def test_nothing_survives_when_the_launcher_is_killed(self):
        process = start(["-n", "3", *sh(f"sleep 100 & echo $! >{self.folder}/pid_child_$RANK; " + self.write_pid() + "wait")])
        pids = self.pids(6)
        self.assertTrue(all(map(alive, pids)))
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(alive, pids)), f"all of {pids} dead")
        process.stdout.close()
        process.stderr.close()

    def test_nobody_who_reads_the_output_stops_the_job(self):
        process = start(["-n", "2", "yes"])
        process.stdout.close()
        self.assertIn("nobody reads", process.stderr.read())
        process.stderr.close()
        self.assertEqual(process.wait(timeout=LIMIT_S), 128 + signal.SIGPIPE)


class Restarts(Scratch):
    def test_ranks_are_started_again_until_they_succeed(self):
        # A rank fails when both have spoken: the other one would be stopped.
        started = f"{self.folder}/started_${{TORCHELASTIC_RESTART_COUNT}}"
        script = (f"echo start $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; : >{started}_$RANK; "
                  "test $TORCHELASTIC_RESTART_COUNT = 2 || { "
                  f"until test -e {started}_0 && test -e {started}_1; do sleep 0.01; done; exit 5; }}")
        result = run("-n", "2", "--max-restarts", "3", "--log-dir", str(self.folder), *sh(script))
        self.assertEqual(result.returncode, 0, result.err)
        for attempt in range(3):
            self.assertEqual(result.out.count(f"start {attempt} of 3"), 2, result.out)
        self.assertEqual(result.err.count("starting again"), 2)
        self.assertEqual((self.folder / "rank_0.restart_2.log").read_text(), "start 2 of 3\n")

    def test_the_last_failure_counts(self):
        result = run("-n", "1", "--max-restarts", "2", *sh("exit $((TORCHELASTIC_RESTART_COUNT + 10))"))
        self.assertEqual(result.returncode, 12)
        self.assertEqual(re.findall(r"restarts +(\d) of 2", result.err), ["0", "1", "2"])

    def test_an_interrupted_job_is_not_started_again(self):
        process = start(["-n", "1", "--max-restarts", "9", *sh(self.write_pid() + "exec sleep 100")])
        self.pids(1)
        process.terminate()
        _, err = process.communicate(timeout=LIMIT_S)
        self.assertEqual(process.returncode, 128 + signal.SIGTERM)
        self.assertNotIn("starting again", err)


if __name__ == "__main__":
    main()
