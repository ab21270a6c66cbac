"""Nodes of a test on one machine: network namespaces with cables to one switch, and a folder with the job's secret."""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import unittest

SECRET = "0123456789abcdef0123456789abcdef"


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Network:
    """Node i has the address 10.231.SUBNET.(i + 1). Tests that may run at the same time take different subnets."""

    def __init__(self, subnet, nodes):
        self.names = [f"chorale{os.getpid()}n{subnet}x{i}" for i in range(nodes)]
        self.addresses = [f"10.231.{subnet}.{i + 1}" for i in range(nodes)]
        self.switch = f"chorale{os.getpid()}s{subnet}"

    def lay(self):
        """To be called by setUpModule; the tests are skipped where it cannot be done."""
        if os.geteuid() != 0 or not shutil.which("ip"):
            raise unittest.SkipTest("network namespaces need root and the program ip")
        try:
            self._lay()
        except subprocess.CalledProcessError as error:
            self.remove()
            raise unittest.SkipTest(f"no network namespaces here: {error.stderr.strip()}")

    def _lay(self):
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self.switch, "link", "set", "switch", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses)):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("link", "add", "veth0", "netns", name, "type", "veth", "peer", "name", f"port{i}", "netns", self.switch)
            ip("-n", self.switch, "link", "set", f"port{i}", "master", "switch", "up")
            ip("-n", name, "address", "add", address + "/24", "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")

    def remove(self):
        """To be called by tearDownModule."""
        for name in self.names + [self.switch]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def on(self, node, *command):
        """The command line that runs `command` on the node."""
        return ["ip", "netns", "exec", self.names[node], *command]

    def pull(self, test, node):
        """Pulls the node's cable until the test is over."""
        ip("-n", self.switch, "link", "set", f"port{node}", "down")
        test.addCleanup(ip, "-n", self.switch, "link", "set", f"port{node}", "up")

    def drop(self, node):
        """The switch drops whatever the node sends and gets, without a word: its cable still looks well."""
        ip("-n", self.switch, "link", "set", f"port{node}", "nomaster")

    def drop_no_more(self, node):
        ip("-n", self.switch, "link", "set", f"port{node}", "master", "switch")

    def slow(self, test, *nodes, rate="100mbit"):
        """What the nodes send is slow until the test is over."""
        for node in nodes:
            subprocess.run(self.on(node, "tc", "qdisc", "add", "dev", "veth0", "root", "tbf", "rate", rate, "burst", "64kb",
                                   "latency", "200ms"), check=True)
            test.addCleanup(subprocess.run, self.on(node, "tc", "qdisc", "del", "dev", "veth0", "root"))


class NetworkTest(unittest.TestCase):
    """Programs on nodes. They end with the test."""
    limit_s = 60

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.secret = self.secret_file(SECRET)
        self.processes = []
        self.addCleanup(self.clean)

    def secret_file(self, text):
        path = self.folder / f"secret_{text[:4]}"
        path.write_text(text + "\n")
        path.chmod(0o600)
        return str(path)

    def clean(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def start_saying(self, name, command, environment):
        """What it says is kept under this name."""
        with open(self.folder / name, "w") as out:
            self.processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))

    def said(self, name):
        return (self.folder / name).read_text()

    def wait_for(self, name, pattern):
        """Until it has said a line that matches."""
        end = time.monotonic() + self.limit_s
        while True:
            found = re.search(pattern, self.said(name), re.MULTILINE)
            if found:
                return found
            self.assertLess(time.monotonic(), end, f"{name} did not say '{pattern}' but:\n{self.said(name)}")
            time.sleep(0.02)
