#!/usr/bin/env python3
"""Groups that span nodes: `chorale run --nnodes` on network namespaces with cables to one switch.

  hosts_test.py BIN      BIN is the folder of the built programs
"""
import os
import pathlib
import signal
import sys
import time
import unittest

from network import Network, NetworkTest
from unittest_main import main

BIN = pathlib.Path(sys.argv.pop(1)).resolve()
OPTIONS = "--gtest_also_run_disabled_tests --gtest_brief=1"
RANK = f"{BIN}/comm_test {OPTIONS} --gtest_filter=RankOnAHost"
TRAINING_RANK = f"{BIN}/parallel_test {OPTIONS} --gtest_filter=SameBits"
AGENT_RANK = f"{BIN}/rpc_test {OPTIONS} --gtest_filter=RankOfAgents"
# Launchers stop all ranks when one has ended or a node is lost; these go on for as long as it takes them to say what they saw.
STAYING_AGENT_RANK = f"trap '' TERM; {AGENT_RANK}"
NETWORK = Network(subnet=79, nodes=3)
PORT = 29513
MIB = 1 << 20


def setUpModule():
    NETWORK.lay()


def tearDownModule():
    NETWORK.remove()


class Hosts(NetworkTest):
    def start(self, nodes, test, ranks=1, program=RANK, then="", **variables):
        for node in range(nodes):
            environment = {**os.environ, "CHORALE_SECRET_FILE": self.secret, "CHORALE_FLIGHT_DIR": str(self.folder),
                           "CHORALE_KEEP_ALIVE": "1", **variables}
            command = [f"{BIN}/chorale", "run", "-n", str(ranks), "--nnodes", str(nodes), "--node-rank", str(node),
                       "--rdzv", f"{NETWORK.addresses[0]}:{PORT}", "sh", "-c", f"{program}.{test}{then}"]
            self.start_saying(f"node{node}", NETWORK.on(node, *command), environment)

    def finish(self, nodes):
        for node in range(nodes):
            self.assertEqual(self.processes[node].wait(self.limit_s), 0, self.said(f"node{node}"))
        self.processes = []

    def expect_words(self, nodes, words, ranks):
        """From every rank."""
        for node in range(nodes):
            said = self.said(f"node{node}")
            self.assertEqual(said.count(words), ranks, said)

    def test_every_rank_gets_the_same_bits_on_two_and_three_nodes(self):
        for nodes, ranks in ((2, 2), (3, 1)):
            self.start(nodes, "DISABLED_DoesWhatAllDo", ranks)
            self.finish(nodes)
            self.expect_words(nodes, "all is well over tls", ranks)

    def test_training_gives_the_bits_of_threads_over_every_fabric(self):
        for fabric, ranks in (("tls", 1), ("ucx", 1), ("tls", 2)):
            self.start(2, "DISABLED_OnThisNode", ranks, TRAINING_RANK, CHORALE_FABRIC=fabric, UCX_TLS="tcp")
            self.finish(2)
            self.expect_words(2, f"same bits over {fabric}", ranks)

    def test_calls_references_and_gradients_cross_nodes(self):
        for fabric, ranks in (("tls", 1), ("ucx", 1), ("tls", 2)):
            self.start(2, "DISABLED_DoesSomethingOfEachSection", ranks, AGENT_RANK, CHORALE_FABRIC=fabric, UCX_TLS="tcp")
            self.finish(2)
            self.expect_words(2, f"all is well over {fabric}", ranks)

    def expect_missed(self, *nodes):
        for node in nodes:
            seconds = float(self.wait_for(f"node{node}", r"worker\d was missed after (.*) s$")[1])
            # A closed connection counts at once, and the keep-alive is 1 s; the rest is for a machine that is busy.
            self.assertLess(seconds, 5, self.said(f"node{node}"))

    def test_a_worker_that_dies_is_named_on_the_other_nodes(self):
        self.start(3, "DISABLED_LosesAWorker", program=STAYING_AGENT_RANK, WORKER_DIES="1")
        self.expect_missed(0, 2)

    def test_a_worker_that_is_cut_off_is_named_on_the_other_nodes_and_names_them(self):
        self.start(3, "DISABLED_LosesAWorker", program=STAYING_AGENT_RANK)
        for node in range(3):
            self.wait_for(f"node{node}", "a worker says: waits")
        NETWORK.pull(self, 1)
        self.expect_missed(0, 1, 2)

    # spec: test_ddp_hook_parity_post_localSGD
    def test_gradients_are_averaged_on_each_node_after_the_first_steps(self):
        self.start(3, "DISABLED_OnThisNode", 2, f"{BIN}/parallel_test {OPTIONS} --gtest_filter=PostLocalSgd")
        self.finish(3)
        for node in range(3):
            said = self.said(f"node{node}")
            self.assertEqual(said.count(f"the average of this node is {2 * node + 0.5}"), 2, said)

    def test_a_pulled_cable_ends_an_all_reduce_on_every_rank_within_the_keep_alive(self):
        self.start(3, "DISABLED_ReducesMuch", REDUCE_BYTES=str(64 * MIB), ALL_REDUCES="1000")
        self.wait_for("node0", "all-reduce 1 is done")
        NETWORK.pull(self, 2)
        for node in (0, 1):
            found = self.wait_for(f"node{node}", r"rank \d says: after \d+ all-reduces and (\d+) ms, because of rank (\d): (.*)")
            # The keep-alive is 1 s; the rest is for a machine that is busy.
            self.assertLess(int(found[1]), 4000, found[0])
            self.assertEqual(found[2], "2", found[0])
            self.assertIn("rank 2", found[3])
        self.wait_for("node2", r"because of rank [01]")

    def test_an_outage_of_half_the_keep_alive_is_survived_and_one_of_all_of_it_is_not(self):
        keep_alive = 4
        self.start(2, "DISABLED_ReducesMuch", then="; exit 3", REDUCE_BYTES=str(MIB), ALL_REDUCES="1000000",
                   CHORALE_KEEP_ALIVE=str(keep_alive))
        self.wait_for("node0", "all-reduce 10 is done")
        NETWORK.drop(1)
        time.sleep(keep_alive / 2)
        before = self.said("node0").count("is done")
        NETWORK.drop_no_more(1)
        self.wait_for("node0", f"all-reduce {before + 20} is done")
        time.sleep(keep_alive / 2)  # TCP repeats what was lost after as long again
        NETWORK.drop(1)
        self.addCleanup(NETWORK.drop_no_more, 1)
        start = time.monotonic()
        self.wait_for("node0", "because of rank 1: .*unreachable")
        verdict = time.monotonic()
        # One to one and a quarter of the keep-alive; the call ends within 2 s of that.
        self.assertGreater(verdict - start, keep_alive * 0.9)
        self.assertLess(verdict - start, keep_alive * 1.25 + 2)
        for node in (0, 1):
            self.assertIn(self.processes[node].wait(self.limit_s), (1, 3), self.said(f"node{node}")[-2000:])
        # The rank ends at once, and its launcher 2 s after it; the rest is for a machine that is busy.
        self.assertLess(time.monotonic() - verdict, 5)

    def test_a_rank_that_is_stopped_is_given_up_after_a_patience(self):
        self.start(2, "DISABLED_ReducesMuch", program=f"echo pid $$; exec {RANK}", REDUCE_BYTES=str(MIB), ALL_REDUCES="1000000",
                   CHORALE_STOP_PATIENCE="2")
        pid = int(self.wait_for("node1", r"pid (\d+)")[1])
        self.wait_for("node0", "all-reduce 10 is done")
        os.kill(pid, signal.SIGSTOP)
        self.addCleanup(os.kill, pid, signal.SIGKILL)
        found = self.wait_for("node0", r"and (\d+) ms, because of rank 1: .*it is stopped since")
        self.assertGreater(int(found[1]), 2000, found[0])

    def test_a_slow_link_is_no_failure(self):
        NETWORK.slow(self, 0, 1)
        start = time.monotonic()
        self.start(2, "DISABLED_ReducesMuch", REDUCE_BYTES=str(16 * MIB), ALL_REDUCES="2")
        for node in (0, 1):
            self.wait_for(f"node{node}", "all-reduce 1 is done")
        # Each of two ranks sends as many bytes as there are, in all.
        self.assertGreater(time.monotonic() - start, 2 * 16 * MIB * 8 / 100e6 * 0.9, "the link was not slow")
        self.finish(2)


if __name__ == "__main__":
    main()
