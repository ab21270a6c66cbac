#!/usr/bin/env python3
"""`chorale run --nnodes 2` on two nodes that are network namespaces with cables to one switch.

  nodes_test.py BIN      BIN is the folder of the built programs
"""
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import unittest

from network import Network, NetworkTest
from unittest_main import main

BIN = pathlib.Path(sys.argv.pop(1)).resolve()
CHORALE = str(BIN / "chorale")
# Prints a line with what it got from the others through the store.
MEET = f"exec {BIN}/transport_test --gtest_also_run_disabled_tests --gtest_filter='RankOfALauncher.*'"
NETWORK = Network(subnet=77, nodes=2)
ADDRESSES = NETWORK.addresses
PORT = 29511


def setUpModule():
    NETWORK.lay()


def tearDownModule():
    NETWORK.remove()


class Nodes(NetworkTest):
    limit_s = 40

    def start(self, node, script, *options, ranks=1, secret=None):
        command = NETWORK.on(node, CHORALE, "run", "-n", str(ranks), "--nnodes", "2", "--node-rank", str(node), "--rdzv",
                             f"{ADDRESSES[0]}:{PORT}", *options, "sh", "-c", script)
        environment = dict(os.environ, CHORALE_SECRET_FILE=secret or self.secret)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        self.processes.append(process)
        return process

    def finish(self, process):
        out, err = process.communicate(timeout=self.limit_s)
        return process.returncode, sorted(out.splitlines()), err

    def wait_for_lines(self, count):
        """Ranks announce themselves in files."""
        end = time.monotonic() + self.limit_s
        while len(list(self.folder.glob("up_*"))) < count:
            self.assertLess(time.monotonic(), end, f"{count} ranks are not up")
            time.sleep(0.05)

    def announce(self):
        return f"touch {self.folder}/up_$RANK; "

    def test_ranks_are_numbered_over_the_nodes_in_order(self):
        script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $MASTER_PORT"
        second, first = self.start(1, script, ranks=3), self.start(0, script, ranks=2)
        (status0, out0, err0), (status1, out1, err1) = self.finish(first), self.finish(second)
        self.assertEqual((status0, status1), (0, 0), err0 + err1)
        port = out0[0].split()[-1]
        self.assertEqual(out0, [f"[{r}] {r} {r} 5 2 0 {ADDRESSES[0]} {port}" for r in (0, 1)])
        self.assertEqual(out1, [f"[{r}] {r} {r - 2} 5 3 1 {ADDRESSES[0]} {port}" for r in (2, 3, 4)])

    def test_ranks_of_both_nodes_meet_in_the_store_of_node_0(self):
        first, second = self.start(0, MEET, ranks=2), self.start(1, MEET)
        (status0, out0, err0), (status1, out1, err1) = self.finish(first), self.finish(second)
        self.assertEqual((status0, status1), (0, 0), err0 + err1)
        places = f" | {ADDRESSES[0]} 0 of 2 | {ADDRESSES[0]} 1 of 2 | {ADDRESSES[1]} 0 of 1"
        for rank in range(3):
            self.assertIn(f"[{rank}] rank {rank} of 3:{places}", out0 + out1)

    def test_ranks_meet_on_two_nodes_without_a_launcher(self):
        environment = dict(os.environ, CHORALE_SECRET_FILE=self.secret, WORLD_SIZE="2", MASTER_ADDR=ADDRESSES[0],
                           MASTER_PORT=str(PORT))
        for node in (1, 0):
            self.processes.append(subprocess.Popen(NETWORK.on(node, "sh", "-c", MEET), stdout=subprocess.PIPE,
                                                   stderr=subprocess.PIPE, text=True,
                                                   env=dict(environment, RANK=str(node))))
        for process in list(self.processes):
            status, out, err = self.finish(process)
            self.assertEqual(status, 0, err)
            self.assertTrue(any(f": | {ADDRESSES[0]} 0 of 1 | {ADDRESSES[1]} 0 of 1" in line for line in out), out)

    def test_a_job_is_trained_on_two_nodes(self):
        line = ["train", "fashion-mnist", "--model", "mlp", "--steps", "10", "--batch", "64", "-n", "1", "--nnodes", "2", "--rdzv",
                f"{ADDRESSES[0]}:{PORT}", "--node-rank"]
        places = [self.folder / "node0", self.folder / "node1"]  # each node has files of its own
        for node, place in enumerate(places):
            place.mkdir()
            self.processes.append(subprocess.Popen(NETWORK.on(node, CHORALE, *line, str(node)), cwd=place,
                                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                                   env=dict(os.environ, CHORALE_SECRET_FILE=self.secret)))
        (status0, out0, err0), (status1, out1, err1) = map(self.finish, self.processes)
        self.assertEqual((status0, status1), (0, 0), err0 + err1)
        self.assertRegex("\n".join(out0), "ranks: 2,.*run: runs/fashion-mnist-1")
        self.assertEqual(out1, [])
        self.assertTrue((places[0] / "runs/fashion-mnist-1/report.html").exists())
        self.assertEqual(list(places[1].iterdir()), [])

    def test_a_failure_on_one_node_stops_the_other(self):
        script = self.announce() + "test $RANK = 1 || exec sleep 100; sleep 1; echo broken >&2; exit 9"
        first, second = self.start(0, script), self.start(1, script)
        (status0, _, err0), (status1, _, err1) = self.finish(first), self.finish(second)
        self.assertEqual((status0, status1), (9, 9), err0 + err1)
        for err in (err0, err1):
            self.assertRegex(err, r"rank 1 on \S+ failed: exit code 9")
        self.assertIn("broken", err1)

    def test_both_nodes_start_again(self):
        script = "test $TORCHELASTIC_RESTART_COUNT = 1 && exit 0; sleep 0.$RANK; test $RANK = 1 && exit 9; sleep 100"
        first, second = (self.start(node, script, "--max-restarts", "2") for node in (0, 1))
        (status0, _, err0), (status1, _, err1) = self.finish(first), self.finish(second)
        self.assertEqual((status0, status1), (0, 0), err0 + err1)
        self.assertIn("restart 1 of 2", err0)
        self.assertIn("restart 1 of 2", err1)

    def test_a_node_that_is_done_waits_for_the_other(self):
        script = "test $RANK = 0 && exit 0; sleep 1; exit 6"
        first, second = self.start(0, script), self.start(1, script)
        self.assertEqual((self.finish(first)[0], self.finish(second)[0]), (6, 6))

    def test_ctrl_c_on_one_node_stops_both(self):
        script = self.announce() + "exec sleep 100"
        first, second = self.start(0, script), self.start(1, script)
        self.wait_for_lines(2)
        second.send_signal(signal.SIGINT)
        (status0, _, err0), (status1, _, err1) = self.finish(first), self.finish(second)
        self.assertEqual((status0, status1), (130, 130), err0 + err1)
        self.assertIn("stopped by SIGINT", err0)

    def test_the_loss_of_node_0_stops_the_other(self):
        script = self.announce() + "exec sleep 100"
        first, second = self.start(0, script), self.start(1, script)
        self.wait_for_lines(2)
        first.kill()
        status, _, err = self.finish(second)
        self.assertEqual(status, 1)
        self.assertRegex(err, r"lost node 0 \(\S+\)")

    def test_a_node_with_another_secret_is_refused(self):
        first = self.start(0, "true")
        second = self.start(1, "true", secret=self.secret_file("fedcba9876543210fedcba9876543210"))
        status, _, err = self.finish(second)
        self.assertEqual(status, 1)
        self.assertIn("secret", err)
        self.assertIsNone(first.poll())
        friend = self.start(1, "echo here")
        self.assertEqual(self.finish(friend)[:2], (0, ["[1] here"]))
        status, _, err = self.finish(first)
        self.assertEqual(status, 0)
        self.assertRegex(err, re.escape(f"refused {ADDRESSES[1]}:"))

    def test_two_nodes_with_one_number_are_noticed(self):
        pair = [self.start(0, "true"), self.start(0, "true")]
        end = time.monotonic() + self.limit_s
        while all(process.poll() is None for process in pair):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)
        pair.sort(key=lambda process: process.poll() is None)
        status, _, err = self.finish(pair[0])
        self.assertEqual(status, 1)
        self.assertIn("Address already in use", err)
        self.assertEqual(self.finish(self.start(1, "true"))[0], 0)
        self.assertEqual(self.finish(pair[1])[0], 0)

    def test_a_second_launcher_of_a_node_is_refused_and_the_job_goes_on(self):
        script = self.announce() + f"while test ! -e {self.folder}/end; do sleep 0.1; done"
        first, second = self.start(0, script), self.start(1, script)
        self.wait_for_lines(2)
        status, _, err = self.finish(self.start(1, script))
        self.assertEqual(status, 1)
        self.assertRegex(err, r"--node-rank 1 is taken by process \d+ on \S+")
        (self.folder / "end").touch()
        self.assertEqual((self.finish(first)[0], self.finish(second)[0]), (0, 0))

    def test_a_launcher_that_is_killed_is_noticed_at_once(self):
        script = self.announce() + "exec sleep 100"
        first, second = self.start(0, script), self.start(1, script)
        self.wait_for_lines(2)
        start = time.monotonic()
        second.kill()
        status, _, err = self.finish(first)
        self.assertEqual(status, 1)
        self.assertRegex(err, r"lost node 1 \(\S+\): its launcher has ended")
        self.assertLess(time.monotonic() - start, 8, "less than the keep-alive")


if __name__ == "__main__":
    main()
