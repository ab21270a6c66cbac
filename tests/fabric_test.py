#!/usr/bin/env python3
"""Messages over TLS, and over UCX, between three nodes that are network namespaces with cables to one switch: a cable is
pulled, a link is slow, a rank is stopped or killed.

  fabric_test.py BIN      BIN is the folder of the built programs
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

BIN = pathlib.Path(sys.argv.pop(1)).resolve()
RANK = [f"{BIN}/transport_test", "--gtest_also_run_disabled_tests", "--gtest_filter=RankOfAFabric.*"]
LIMIT_S = 60
SWITCH = f"chorale{os.getpid()}s"
NAMES = [f"chorale{os.getpid()}f{i}" for i in range(3)]
ADDRESSES = [f"10.231.78.{i + 1}" for i in range(3)]
PORT = 29512
MIB = 1 << 20


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def lay_the_cables():
    ip("netns", "add", SWITCH)
    ip("-n", SWITCH, "link", "add", "switch", "type", "bridge")
    ip("-n", SWITCH, "link", "set", "switch", "up")
    for i, (name, address) in enumerate(zip(NAMES, ADDRESSES)):
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "veth0", "netns", name, "type", "veth", "peer", "name", f"port{i}", "netns", SWITCH)
        ip("-n", SWITCH, "link", "set", f"port{i}", "master", "switch", "up")
        ip("-n", name, "address", "add", address + "/24", "dev", "veth0")
        ip("-n", name, "link", "set", "veth0", "up")


def setUpModule():
    if os.geteuid() != 0 or not shutil.which("ip"):
        raise unittest.SkipTest("network namespaces need root and the program ip")
    try:
        lay_the_cables()
    except subprocess.CalledProcessError as error:
        tearDownModule()
        raise unittest.SkipTest(f"no network namespaces here: {error.stderr.strip()}")


def tearDownModule():
    for name in NAMES + [SWITCH]:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


class Fabric(unittest.TestCase):
    fabric = "tls"

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.secret = self.folder / "secret"
        self.secret.write_text("0123456789abcdef0123456789abcdef\n")
        self.secret.chmod(0o600)
        self.ranks = []
        self.addCleanup(self.clean)

    def clean(self):
        for process in self.ranks:
            if process.poll() is None:
                process.kill()
            process.wait()

    def start(self, size, bytes, exchanges, keep_alive_ms=1000):
        """All ranks are connected when this returns."""
        for rank in range(size):
            environment = dict(os.environ, CHORALE_FABRIC=self.fabric, CHORALE_SECRET_FILE=str(self.secret),
                               WORLD_SIZE=str(size), RANK=str(rank), MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(PORT),
                               EXCHANGE_BYTES=str(bytes), EXCHANGES=str(exchanges), KEEP_ALIVE_MS=str(keep_alive_ms))
            with open(self.folder / f"rank{rank}", "w") as out:
                self.ranks.append(subprocess.Popen(["ip", "netns", "exec", NAMES[rank], *RANK], stdout=out,
                                                   stderr=subprocess.STDOUT, env=environment))
        for rank in range(size):
            self.wait_for(rank, "connected")

    def wait_for(self, rank, pattern):
        """When the rank said it, and the line."""
        end = time.monotonic() + LIMIT_S
        while True:
            text = (self.folder / f"rank{rank}").read_text()
            found = re.search(rf"^(\d+\.\d+) ({pattern}.*)$", text, re.MULTILINE)
            if found:
                return float(found[1]), found[2]
            self.assertLess(time.monotonic(), end, f"rank {rank} did not say '{pattern}' but:\n{text}")
            time.sleep(0.02)

    def finish(self, *ranks):
        for rank in ranks:
            status = self.ranks[rank].wait(LIMIT_S)
            self.assertEqual(status, 0, (self.folder / f"rank{rank}").read_text())

    def test_a_pulled_cable_is_noticed_within_the_keep_alive_and_the_others_go_on(self):
        self.start(3, 64 * MIB, 8)
        self.wait_for(0, "connected")
        time.sleep(0.1)
        before = time.monotonic()
        ip("-n", SWITCH, "link", "set", "port2", "down")
        self.addCleanup(ip, "-n", SWITCH, "link", "set", "port2", "up")
        for rank, peers in ((0, [2]), (1, [2]), (2, [0, 1])):
            for peer in peers:
                when, line = self.wait_for(rank, f"rank {peer} is lost")
                self.assertIn("unreachable: acknowledged nothing for", line)
                # The keep-alive is 1 s; the rest is for a machine that is busy.
                self.assertLess(when - before, 1.5, line)
                self.wait_for(rank, rf"rank {peer}: \d exchanges, then a failure")
        for rank, peer in ((0, 1), (1, 0)):
            self.wait_for(rank, f"rank {peer}: 8 exchanges$")
        self.finish(0, 1, 2)

    def test_a_slow_link_stays_connected(self):
        for name in NAMES[:2]:
            subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "veth0", "root", "tbf", "rate",
                            "100mbit", "burst", "64kb", "latency", "200ms"], check=True)
            self.addCleanup(subprocess.run, ["ip", "netns", "exec", name, "tc", "qdisc", "del", "dev", "veth0", "root"])
        self.start(2, 24 * MIB, 2)
        for rank in (0, 1):
            start, _ = self.wait_for(rank, "connected")
            end, _ = self.wait_for(rank, f"rank {1 - rank}: 2 exchanges$")
            self.assertGreater(end - start, 2 * 24 * MIB * 8 / 100e6 * 0.9, "the link was not slow")
        self.finish(0, 1)
        for rank in (0, 1):
            self.assertNotIn("lost", (self.folder / f"rank{rank}").read_text())

    def test_a_stopped_rank_is_silent_and_goes_on_when_it_is_woken(self):
        self.start(2, 64 * MIB, 10, keep_alive_ms=400)
        self.ranks[1].send_signal(signal.SIGSTOP)
        self.wait_for(0, "rank 1 is silent: silent for 0.* stopped by a signal or a debugger")
        time.sleep(1.5)
        self.assertNotIn("lost", (self.folder / "rank0").read_text())
        self.ranks[1].send_signal(signal.SIGCONT)
        self.wait_for(0, "rank 1 is connected")
        for rank in (0, 1):
            self.wait_for(rank, f"rank {1 - rank}: 10 exchanges$")
        self.finish(0, 1)

    def test_a_killed_rank_is_noticed_at_once(self):
        self.start(3, 64 * MIB, 4)
        before = time.monotonic()
        self.ranks[2].kill()
        for rank in (0, 1):
            when, line = self.wait_for(rank, "rank 2 is lost")
            self.assertIn("killed, crashed or exited", line)
            self.assertLess(when - before, 1)
            self.wait_for(rank, f"rank {1 - rank}: 4 exchanges$")
        self.finish(0, 1)


@unittest.skipUnless((BIN.parent / "lib" / "chorale_ucx.so").exists(), "built without UCX")
class FabricOverUcx(Fabric):
    fabric = "ucx"
    test_a_slow_link_stays_connected = None  # as slow again, and nothing new


if __name__ == "__main__":
    unittest.main(verbosity=0)
