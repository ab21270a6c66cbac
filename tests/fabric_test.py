#!/usr/bin/env python3
"""Messages over TLS, and over UCX, between three nodes that are network namespaces with cables to one switch: a cable is
pulled, a link is slow, a rank is stopped or killed.

  fabric_test.py BIN      BIN is the folder of the built programs
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
RANK = [f"{BIN}/transport_test", "--gtest_also_run_disabled_tests", "--gtest_filter=RankOfAFabric.*"]
NETWORK = Network(subnet=78, nodes=3)
PORT = 29512
MIB = 1 << 20


def setUpModule():
    NETWORK.lay()


def tearDownModule():
    NETWORK.remove()


class Fabric(NetworkTest):
    fabric = "tls"

    def start(self, size, bytes, exchanges, keep_alive_ms=1000):
        """All ranks are connected when this returns."""
        for rank in range(size):
            environment = dict(os.environ, CHORALE_FABRIC=self.fabric, CHORALE_SECRET_FILE=self.secret,
                               WORLD_SIZE=str(size), RANK=str(rank), MASTER_ADDR=NETWORK.addresses[0],
                               MASTER_PORT=str(PORT), EXCHANGE_BYTES=str(bytes), EXCHANGES=str(exchanges),
                               KEEP_ALIVE_MS=str(keep_alive_ms))
            self.start_saying(f"rank{rank}", NETWORK.on(rank, *RANK), environment)
        for rank in range(size):
            self.when(rank, "connected")

    def when(self, rank, pattern):
        """When the rank said it, and the line."""
        found = self.wait_for(f"rank{rank}", rf"^(\d+\.\d+) ({pattern}.*)$")
        return float(found[1]), found[2]

    def finish(self, *ranks):
        for rank in ranks:
            self.assertEqual(self.processes[rank].wait(self.limit_s), 0, self.said(f"rank{rank}"))

    def test_a_pulled_cable_is_noticed_within_the_keep_alive_and_the_others_go_on(self):
        self.start(3, 64 * MIB, 8)
        self.when(0, "connected")
        time.sleep(0.1)
        before = time.monotonic()
        NETWORK.pull(self, 2)
        for rank, peers in ((0, [2]), (1, [2]), (2, [0, 1])):
            for peer in peers:
                when, line = self.when(rank, f"rank {peer} is lost")
                self.assertIn("unreachable: acknowledged nothing for", line)
                # The keep-alive is 1 s; the rest is for a machine that is busy. The kernel itself would take minutes.
                self.assertLess(when - before, 5, line)
                self.when(rank, rf"rank {peer}: \d exchanges, then a failure")
        for rank, peer in ((0, 1), (1, 0)):
            self.when(rank, f"rank {peer}: 8 exchanges$")
        self.finish(0, 1, 2)

    def test_a_slow_link_stays_connected(self):
        NETWORK.slow(self, 0, 1)
        self.start(2, 24 * MIB, 2)
        for rank in (0, 1):
            start, _ = self.when(rank, "connected")
            end, _ = self.when(rank, f"rank {1 - rank}: 2 exchanges$")
            self.assertGreater(end - start, 2 * 24 * MIB * 8 / 100e6 * 0.9, "the link was not slow")
        self.finish(0, 1)
        for rank in (0, 1):
            self.assertNotIn("lost", self.said(f"rank{rank}"))

    def test_a_stopped_rank_is_silent_and_goes_on_when_it_is_woken(self):
        self.start(2, 64 * MIB, 10, keep_alive_ms=400)
        self.processes[1].send_signal(signal.SIGSTOP)
        self.when(0, "rank 1 is silent: silent for 0.* stopped by a signal or a debugger")
        time.sleep(1.5)
        self.assertNotIn("lost", self.said("rank0"))
        self.processes[1].send_signal(signal.SIGCONT)
        self.when(0, "rank 1 is connected")
        for rank in (0, 1):
            self.when(rank, f"rank {1 - rank}: 10 exchanges$")
        self.finish(0, 1)

    def test_a_killed_rank_is_noticed_at_once(self):
        self.start(3, 64 * MIB, 4, keep_alive_ms=20_000)
        before = time.monotonic()
        self.processes[2].kill()
        for rank in (0, 1):
            when, line = self.when(rank, "rank 2 is lost")
            self.assertIn("killed, crashed or exited", line)
            self.assertLess(when - before, 10, "long before the keep-alive ends")
            self.when(rank, f"rank {1 - rank}: 4 exchanges$")
        self.finish(0, 1)


@unittest.skipUnless((BIN.parent / "lib" / "chorale_ucx.so").exists(), "built without UCX")
class FabricOverUcx(Fabric):
    fabric = "ucx"
    test_a_slow_link_stays_connected = None  # as slow again, and nothing new


if __name__ == "__main__":
    main()
