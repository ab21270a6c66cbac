#!/usr/bin/env python3
"""`chorale run` in bad surroundings: output that nobody reads, signals that are ignored, descriptors that are closed.

  surroundings_test.py BIN      BIN is the folder of the built programs
"""
import fcntl
import os
import pathlib
import pty
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
import unittest

from processes import LIMIT_S, alive, wait_until
from unittest_main import main

BIN = pathlib.Path(sys.argv.pop(1)).resolve()
CHORALE = str(BIN / "chorale")
# Makes twenty calls with the others.
WORK = [str(BIN / "comm_test"), "--gtest_also_run_disabled_tests", "--gtest_filter=RankOfALauncher.*"]


def sh(script):
    return ["sh", "-c", script]


def defaults():
    """Whatever this test was started with: the signals are as a terminal gives them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def ignoring(*numbers):
    def prepare():
        defaults()
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
    return prepare


def start(*arguments, **options):
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    options.setdefault("preexec_fn", defaults)
    return subprocess.Popen([CHORALE, "run", *arguments], **options)


class Scratch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.started = []
        self.addCleanup(self.kill)

    def kill(self):
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def start(self, *arguments, **options):
        process = start(*arguments, **options)
        self.started.append(process)
        return process

    def pid(self, rank):
        path = self.folder / f"pid_{rank}"
        wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"rank {rank}")
        return int(path.read_text())

    def write_pid(self):
        return f"echo $$ >{self.folder}/pid_$RANK; "


FLOOD = "exec yes 0123456789"


class Output(Scratch):
    def test_signals_are_heard_though_nobody_reads(self):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            process = self.start("-n", "1", *sh(self.write_pid() + FLOOD))
            pid = self.pid(0)
            time.sleep(1)  # the pipe and the 8 MiB behind it are full; the verdict does not depend on it
            process.send_signal(number)
            self.assertEqual(process.wait(LIMIT_S), 128 + number)
            self.assertFalse(alive(pid))
            (self.folder / "pid_0").unlink()

    def test_a_dying_rank_is_noticed_though_nobody_reads(self):
        script = self.write_pid() + f"test $RANK = 1 || {FLOOD}; sleep 1; exit 9"
        process = self.start("-n", "2", *sh(script))
        pid = self.pid(0)
        wait_until(lambda: not alive(pid), "the end of rank 0")
        _, err = process.communicate(timeout=LIMIT_S)
        self.assertEqual(process.returncode, 9)
        self.assertIn(b"rank 1", err)

    def test_a_slow_reader_gets_every_line(self):
        lines = 300_000  # more than is kept
        process = self.start("-n", "1", *sh(f"seq 1000000 {1_000_000 + lines - 1} | sed s/$/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx/"),
                             stderr=subprocess.DEVNULL)
        time.sleep(1)
        found, rest = 0, b""
        while chunk := os.read(process.stdout.fileno(), 1 << 16):
            parts = (rest + chunk).split(b"\n")
            rest = parts.pop()
            for line in parts:
                self.assertEqual(line, b"[0] %dxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx" % (1_000_000 + found))
                found += 1
        self.assertEqual((found, rest), (lines, b""))
        self.assertEqual(process.wait(LIMIT_S), 0)

    def test_a_pipe_that_does_not_block_is_no_reason_to_end(self):
        reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETFL, os.O_NONBLOCK)
        process = self.start("-n", "1", *sh("seq 100000"), stdout=writing)
        os.close(writing)
        time.sleep(0.5)
        with open(reading, "rb") as text:
            self.assertEqual(text.read(), b"".join(b"[0] %d\n" % i for i in range(1, 100_001)))
        self.assertEqual(process.wait(LIMIT_S), 0)

    def test_a_full_disk_lets_the_work_be_finished_and_is_said(self):
        with open("/dev/full", "w") as full:
            process = self.start("-n", "2", *sh(f"echo lost; sleep 0.5; echo lost; touch {self.folder}/done_$RANK"), stdout=full)
            _, err = process.communicate(timeout=LIMIT_S)
        self.assertEqual(process.returncode, 4)
        self.assertEqual(err.count(b"cannot write to standard output: No space left on device"), 1, err)
        self.assertEqual(len(list(self.folder.glob("done_*"))), 2)

    def test_a_reader_that_has_gone_ends_the_job(self):
        process = self.start("-n", "1", *sh(self.write_pid() + "while sleep 0.1; do echo x; done"))
        pid = self.pid(0)
        process.stdout.close()
        process.stdout = None
        self.assertEqual(process.wait(LIMIT_S), 128 + signal.SIGPIPE)
        self.assertFalse(alive(pid))


class Signals(Scratch):
    def test_what_was_ignored_at_the_start_stays_ignored(self):
        for number in (signal.SIGHUP, signal.SIGINT):
            process = self.start("-n", "1", *sh(self.write_pid() + f"while test ! -e {self.folder}/end; do sleep 0.05; done"),
                                 preexec_fn=ignoring(number))
            pid = self.pid(0)
            process.send_signal(number)
            os.kill(pid, number)
            time.sleep(0.5)  # nothing happens meanwhile
            self.assertTrue(alive(pid), number)
            (self.folder / "end").touch()
            self.assertEqual(process.wait(LIMIT_S), 0, number)
            (self.folder / "end").unlink()
            (self.folder / "pid_0").unlink()

    def test_others_still_stop_it(self):
        process = self.start("-n", "1", *sh(self.write_pid() + "exec sleep 100"), preexec_fn=ignoring(signal.SIGHUP))
        self.pid(0)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(LIMIT_S), 128 + signal.SIGTERM)

    def test_a_rank_may_write_to_a_terminal_that_stops_the_background(self):
        child, terminal = pty.fork()
        if child == 0:
            defaults()
            os.execv("/bin/sh", ["sh", "-c", f"stty tostop; {CHORALE} run -n 1 sh -c 'echo from the rank >/dev/tty'; echo status $?"])
        said, end = b"", time.monotonic() + LIMIT_S
        try:
            while time.monotonic() < end:
                if select.select([terminal], [], [], 0.2)[0]:
                    said += os.read(terminal, 4096)
        except OSError:  # the other end is closed: the shell has ended
            pass
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(terminal)
        self.assertIn(b"from the rank", said)
        self.assertIn(b"status 0", said)


class Descriptors(Scratch):
    def closing(self, *numbers):
        def prepare():
            defaults()
            for number in numbers:
                os.close(number)
        return prepare

    def test_closed_standard_descriptors_are_not_reused(self):
        for numbers in ((0,), (1,), (0, 1, 2)):
            process = self.start("-n", "2", "--log-dir", str(self.folder), *WORK, preexec_fn=self.closing(*numbers),
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self.assertEqual(process.wait(LIMIT_S), 0, numbers)

    def test_ranks_without_a_launcher_keep_their_memory_apart_from_what_they_print(self):
        """Only the library is there to watch its descriptors."""
        for numbers in ((1,), (0, 1, 2)):
            ranks = []
            for rank in (0, 1):
                environment = dict(os.environ, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                                   MASTER_PORT=str(20000 + os.getpid() % 10000))
                process = subprocess.Popen(WORK, env=environment, preexec_fn=self.closing(*numbers))
                self.started.append(process)
                ranks.append(process)
            self.assertEqual([process.wait(LIMIT_S) for process in ranks], [0, 0], numbers)


if __name__ == "__main__":
    main()
