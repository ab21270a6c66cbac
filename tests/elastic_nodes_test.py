#!/usr/bin/env python3
"""`chorale run --elastic` on nodes that are network namespaces with cables to one switch: nodes that are lost, cut off and join.

  elastic_nodes_test.py BIN      BIN is the folder of the built programs
"""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from network import Network, NetworkTest
from unittest_main import main

BIN = pathlib.Path(sys.argv.pop(1)).resolve()
# Trains a small model in f64, and compares each loss with that of one rank (src/chorale/elastic/job_test_util.h).
JOB = [str(BIN / "elastic_test"), "--gtest_also_run_disabled_tests", "--gtest_filter=RankOfAnElasticJob.*", "--gtest_brief=1"]
NETWORK = Network(subnet=83, nodes=4)
PORT = 29517


def setUpModule():
    NETWORK.lay()


def tearDownModule():
    NETWORK.remove()


class Nodes(NetworkTest):
    """Rank 0 stops at a step in the middle until the test says "go": what happens meanwhile happens in the middle of the job."""

    def start(self, node, *place, ranks=1, kills="", hold="20"):
        environment = {**os.environ, "CHORALE_SECRET_FILE": self.secret, "CHORALE_KEEP_ALIVE": "1", "OMP_NUM_THREADS": "1",
                       "ELASTIC_KILLS": kills, "ELASTIC_STEPS": "40", "ELASTIC_HOLD": hold, "ELASTIC_FOLDER": str(self.folder)}
        command = [str(BIN / "chorale"), "run", "-n", str(ranks), "--elastic", "1:8", *place, *JOB]
        self.start_saying(f"node{node}", NETWORK.on(node, *command), environment)

    def start_all(self, nodes, **options):
        """And waits until they are in the middle."""
        for node in range(nodes):
            self.start(node, "--nnodes", str(nodes), "--node-rank", str(node), "--rdzv", f"{NETWORK.addresses[0]}:{PORT}", **options)
        self.wait_until_held(20)

    def wait_until_held(self, step):
        end = time.monotonic() + self.limit_s
        while not (self.folder / f"held_{step}").exists():
            self.assertLess(time.monotonic(), end, "\n".join(self.said(path.name) for path in sorted(self.folder.glob("node*"))))
            time.sleep(0.01)

    def go(self, step=20):
        (self.folder / f"go_{step}").touch()

    def end_of(self, node, status):
        self.assertEqual(self.processes[node].wait(self.limit_s), status, self.said(f"node{node}"))
        return self.said(f"node{node}")

    def ends(self, *nodes):
        """What ranks of these nodes say that came to the end: each has the losses of one rank, and all have the same bits."""
        found = []
        for node in nodes:
            text = self.end_of(node, 0)
            self.assertNotIn("FAILED", text)
            found += re.findall(r"member (\d+) rank (\d+) bits (-?\d+) sizes([ \d]*)", text)
        self.assertEqual(len({end[2:] for end in found}), 1, found)
        self.assertEqual(sorted(int(end[1]) for end in found), list(range(len(found))), found)
        self.assertEqual(found[0][3].split()[-1], str(len(found)))
        return sorted(end[0] for end in found)

    def test_ranks_that_die_are_replaced_on_their_nodes(self):
        self.start_all(2, ranks=2, kills="2@5:backward 0@9:commit")
        # An epoch that a death ends at once is not told everywhere.
        self.wait_for("node0", r"member 0\) died[\s\S]*4 ranks on 2 nodes|4 ranks on 2 nodes: .*member 0\) died")
        self.go()
        self.assertEqual(self.ends(0, 1), sorted(["1", "100000", "200000", "3"]))
        self.assertRegex(self.said("node0"), r"epoch 2, 3 ranks on 2 nodes: rank 2 \(member 2\) died: killed by SIGKILL")

    def test_three_nodes_go_on_without_that_of_the_store_and_two_then_end(self):
        self.start_all(3)
        self.processes[0].kill()
        for node in ("node1", "node2"):
            self.wait_for(node, r"epoch 2, 2 ranks on 2 nodes: lost node 0")
        self.processes[1].kill()  # that of the store by now
        self.assertRegex(self.end_of(2, 1), "not enough of the 2 nodes are reached to go on .*start the job again, it goes on from its last checkpoint")

    def cut_off(self, node):
        """A node is cut off for a while; it ends, and the others go on."""
        others = [other for other in range(3) if other != node]
        self.start_all(3)
        NETWORK.drop(node)
        self.addCleanup(NETWORK.drop_no_more, node)
        start = time.monotonic()
        for other in others:
            self.wait_for(f"node{other}", "epoch 2, 2 ranks on 2 nodes")
        # The keep-alive is 1 s, the verdict up to a quarter later, 2 s for what follows; the rest is for a machine that is busy.
        self.assertLess(time.monotonic() - start, 1.25 + 2 + 5)
        self.assertIn("not enough of the 3 nodes are reached to go on", self.end_of(node, 1))
        NETWORK.drop_no_more(node)
        self.go()
        self.assertEqual(self.ends(*others), [str(other) for other in others])

    def test_the_node_of_the_store_is_cut_off(self):
        self.cut_off(0)

    def test_another_node_is_cut_off(self):
        self.cut_off(2)

    def test_a_partition_that_heals(self):
        """Before the verdict nothing comes of it; behind it, the node hears that the others go on without it."""
        self.start_all(3)
        NETWORK.drop(2)
        self.addCleanup(NETWORK.drop_no_more, 2)
        time.sleep(0.3)
        NETWORK.drop_no_more(2)
        time.sleep(2)
        self.assertNotIn("epoch 2", "".join(self.said(f"node{node}") for node in range(3)))
        NETWORK.drop(2)
        self.wait_for("node0", "epoch 2, 2 ranks on 2 nodes")
        NETWORK.drop_no_more(2)
        self.assertRegex(self.end_of(2, 1), "was excluded from epoch 2|not enough of the 3 nodes")
        self.go()
        self.assertEqual(self.ends(0, 1), ["0", "1"])

    def test_two_nodes_go_on_without_the_other(self):
        self.start_all(2)
        self.processes[1].kill()
        self.wait_for("node0", "epoch 2, 1 ranks on 1 nodes: lost node 1")
        self.go()
        self.assertEqual(self.ends(0), ["0"])

    def test_a_launcher_that_wakes_after_it_was_excluded_ends(self):
        self.start_all(3)
        self.processes[2].send_signal(signal.SIGSTOP)  # "ip netns exec" has become the launcher
        self.wait_for("node0", "epoch 2, 2 ranks on 2 nodes")
        self.processes[2].send_signal(signal.SIGCONT)
        self.assertRegex(self.end_of(2, 1), "was excluded from epoch 2|not enough of the 3 nodes")
        self.go()
        self.assertEqual(self.ends(0, 1), ["0", "1"])

    def test_a_node_joins_a_job(self):
        self.start_all(2)
        place = ("--join", f"{NETWORK.addresses[0]}:{PORT}")
        right, self.secret = self.secret, self.secret_file("fedcba9876543210fedcba9876543210")
        self.start(2, *place)
        self.assertIn("secret", self.end_of(2, 1))
        self.processes.pop()
        self.secret = right
        self.start(2, *place, ranks=2)
        self.wait_for("node0", "ranks on 3 nodes: .*join(.|\n)*4 ranks on 3 nodes|4 ranks on 3 nodes")
        self.go()
        self.assertEqual(self.ends(0, 1, 2), ["0", "1", "300000", "300001"])

    def test_a_node_is_given_back(self):
        self.start_all(2, hold="20 30")
        self.processes[0].send_signal(signal.SIGUSR1)  # that of the store
        self.wait_for("node1", "epoch 2, 1 ranks on 2 nodes: node 0 is wanted back")
        self.go()  # ranks leave between two steps
        self.wait_until_held(30)
        self.assertIn("its ranks leave, and the others go on", self.end_of(0, 0))
        self.wait_for("node1", "epoch 3, 1 ranks on 1 nodes: given back: node 0")
        self.go(30)
        self.assertEqual(self.ends(1), ["1"])

    def test_a_launcher_changes_the_number_of_its_ranks(self):
        self.start_all(2)
        resize = subprocess.run(NETWORK.on(1, str(BIN / "chorale"), "resize", str(self.processes[1].pid), "3"), capture_output=True, text=True)
        self.assertEqual((resize.returncode, resize.stdout), (0, "resized from 2 to 3 ranks\n"), resize.stderr)
        self.wait_for("node0", "epoch 2, 3 ranks on 2 nodes: .*member 200000 joins")
        self.go()
        self.assertEqual(self.ends(0, 1), ["0", "1", "200000"])

    def test_what_ends_one_node_ends_all(self):
        self.start_all(2)
        self.processes[1].send_signal(signal.SIGINT)
        self.end_of(1, 128 + signal.SIGINT)
        self.assertIn("stopped by SIGINT", self.end_of(0, 128 + signal.SIGINT))


class TrainOnNodes(NetworkTest):
    """`chorale train --elastic` when rank 0 comes to be on another node."""

    def start(self, node, out, nodes=2, *more):
        environment = {**os.environ, "CHORALE_SECRET_FILE": self.secret, "CHORALE_KEEP_ALIVE": "1", "OMP_NUM_THREADS": "1"}
        command = [str(BIN / "chorale"), "train", "fashion-mnist", "--model", "mlp", "--batch", "36", "--optimizer", "sgd", "--lr", "0.02", "--schedule", "constant",
                   "--log-every", "1", "--steps", str(self.STEPS), "--checkpoint-every", "0", "-n", "1", "--elastic", "1:4", "--out", str(self.folder / out),
                   "--nnodes", str(nodes), "--node-rank", str(node), "--rdzv", f"{NETWORK.addresses[0]}:{PORT}", *more]
        self.start_saying(f"node{node}", NETWORK.on(node, *command), environment)

    STEPS = 400

    def lines(self, run):
        path = self.folder / run / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for_step(self, run, step):
        end = time.monotonic() + self.limit_s
        while not any(line["kind"] == "train" and line["step"] >= step for line in self.lines(run)):
            self.assertLess(time.monotonic(), end, "\n".join(self.said(path.name) for path in sorted(self.folder.glob("node*")) if path.is_file()))
            time.sleep(0.02)

    def end_of(self, node, status=0):
        self.assertEqual(self.processes[node].wait(self.limit_s), status, self.said(f"node{node}"))

    def kill_rank_0(self):
        launcher = self.processes[0].pid
        children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        ranks = [int(pid) for pid in children if b"--launched" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(ranks[0], signal.SIGKILL)

    def steps_of(self, run):
        return sorted(int(path.name[5:]) for path in (self.folder / run / "checkpoints").glob("step-*"))

    def test_a_folder_that_all_nodes_have_is_opened_by_the_next_rank_0(self):
        for node in range(2):
            self.start(node, "run")
        self.wait_for_step("run", 20)
        self.kill_rank_0()
        for node in range(2):
            self.end_of(node)
        steps = [line["step"] for line in self.lines("run") if line["kind"] == "train"]
        self.assertEqual(len(steps), len(set(steps)))
        self.assertGreater(len(steps), self.STEPS - 3)
        self.assertEqual(steps[-1], self.STEPS)
        self.assertEqual(self.steps_of("run"), [self.STEPS])

    def test_else_the_next_rank_0_makes_one_with_a_checkpoint_at_once(self):
        for node in range(2):
            self.start(node, f"run{node}")
        self.wait_for_step("run0", 20)
        self.kill_rank_0()
        for node in range(2):
            self.end_of(node)
        before = max(line["step"] for line in self.lines("run0") if line["kind"] == "train")
        here = [line["step"] for line in self.lines("run1") if line["kind"] == "train"]
        self.assertLessEqual(abs(here[0] - before - 1), 1)
        self.assertEqual(here[-1], self.STEPS)
        saved = self.steps_of("run1")
        self.assertEqual(saved[-1], self.STEPS)
        self.assertLessEqual(saved[0], here[0])
        self.assertEqual(len(saved), 2, saved)
        self.assertEqual(self.steps_of("run0"), [])
        done = subprocess.run([str(BIN / "chorale"), "train", "fashion-mnist", "--out", str(self.folder / "run1"), "--resume", "--steps", str(self.STEPS + 5), "-n", "1"],
                              capture_output=True, text=True, timeout=self.limit_s)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_a_node_that_has_rank_0_is_given_back(self):
        """The next rank 0 waits for the folder until the one that leaves has let go of it."""
        for node in range(2):
            self.start(node, "run")
        self.wait_for_step("run", 20)
        self.processes[0].send_signal(signal.SIGUSR1)
        self.end_of(0)
        self.end_of(1)
        steps = [line["step"] for line in self.lines("run") if line["kind"] == "train"]
        self.assertEqual(steps, list(range(1, self.STEPS + 1)))
        self.assertEqual(self.steps_of("run"), [self.STEPS])
        self.assertIn("node 0 is wanted back", [line["cause"] for line in self.lines("run") if line["kind"] == "event"][0])

    def test_a_node_that_has_rank_0_is_cut_off(self):
        """It still has the folder that all nodes have, and writes into it until it hears that the others may be without it."""
        for node in range(3):
            self.start(node, "run", 3)
        self.wait_for_step("run", 20)
        NETWORK.drop(0)
        self.addCleanup(NETWORK.drop_no_more, 0)
        self.end_of(0, 1)
        self.end_of(1)
        self.end_of(2)
        steps = [line["step"] for line in self.lines("run") if line["kind"] == "train"]
        self.assertEqual(len(steps), len(set(steps)))
        self.assertGreater(len(steps), self.STEPS - 3)
        self.assertEqual(self.steps_of("run"), [self.STEPS])
        self.assertIn("lost node 0", [line["cause"] for line in self.lines("run") if line["kind"] == "event"][0])

    def test_nodes_with_other_options_are_told(self):
        self.start(0, "run")
        self.start(1, "run", 2, "--lr", "0.01")
        for node in range(2):
            self.assertNotEqual(self.processes[node].wait(self.limit_s), 0)
        self.assertIn("give all nodes the same options", self.said("node0") + self.said("node1"))


if __name__ == "__main__":
    main()
