"""PyTorch's own distributed tests (torch.testing._internal.distributed) on the backend "chorale".

tools/torch_suite starts this program and talks to it: one line of JSON in, {"test", "backend", "limit"}, one line
out, {"outcome", "reason", "output"}. It imports torch and the tests once and then forks: a process for each test, and from that
one the test's ranks. (Ranks that are spawned import everything anew, which takes longer than most tests.)

The suite decides by the backend's name what to run, so ours is presented under a name that it knows. Patched for that:
- ranks are forked from a process that has imported torch;
- the creator registered for gloo makes our backend, of the type that PyTorch gives to backends from outside;
- the profiler's names of our events, and what DistributedDataParallel logs of its backend, are gloo's;
- tests that gloo skips because only MPI has the operation, or because only MPI may have few ranks, are decided as for mpi.
The backend "gloo" runs PyTorch's own, with the same start and nothing else patched.
"""

import inspect
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
import unittest

PRESENT_AS = os.environ.get("PRESENT_AS", "gloo")
RANKS = int(os.environ["WORLD_SIZE"])
os.environ["BACKEND"] = PRESENT_AS

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

if PRESENT_AS == "mpi":
    for names in DistTestCases.backend_feature.values():
        if "gloo" in names:
            names.add("mpi")
    DistTestCases.skip_collective["allgather_coalesced"].discard("mpi")

from torch.testing._internal.common_distributed import MultiProcessTestCase  # noqa: E402
from torch.testing._internal.distributed import ddp_under_dist_autograd_test, distributed_test  # noqa: E402
from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)
from torch.testing._internal.distributed.rpc.dist_autograd_test import (  # noqa: E402
    DistAutogradTest,
    TensorPipeAgentDistAutogradTest,
)
from torch.testing._internal.distributed.rpc.jit.rpc_test import JitRpcTest  # noqa: E402
from torch.testing._internal.distributed.rpc.rpc_test import RpcTest, TensorPipeAgentRpcTest  # noqa: E402
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (  # noqa: E402
    TensorPipeRpcAgentTestFixture,
)

# What is to be run was decided by decorators, on import; from here on the name is that of a backend which exists.
# Only the tests of parts of the world ask once more: two ranks are too few for them.
distributed_test.BACKEND = "gloo"
if RANKS < 3:
    os.environ["BACKEND"] = "gloo"


def present_ours_as_gloo():
    """In a rank and not before: memory that a forked process inherits is private and cannot be mapped by peers."""
    os.environ["CHORALE_TORCH_PROFILE_AS"] = "gloo"
    import chorale_torch

    dist.Backend._plugins["GLOO"] = dist.Backend._BackendPlugin(chorale_torch.make_backend, True)
    dist.Backend.backend_type_map["gloo"] = dist.ProcessGroup.BackendType.CUSTOM
    log_of = torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data

    def log_as_of_gloo(ddp):
        log = log_of(ddp)
        if log["backend_name"] != "custom":
            return log
        variables = {name: os.environ.get(name.upper(), "N/A") for name in ("gloo_socket_ifname", "gloo_device_transport")}
        return {**log, **variables, "backend_name": "gloo", "gloo_num_threads": 2}

    torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data = log_as_of_gloo


class OnBackend(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, *args, **kwargs):
        if os.environ["SUITE_BACKEND"] == "chorale":
            present_ours_as_gloo()
        super()._run(*args, **kwargs)


class Suite(OnBackend, TestDistBackend, DistributedTest._DistTestBase):
    pass


# The number of ranks is each test's own, so their classes come first.
class OverRpc(TensorPipeRpcAgentTestFixture, OnBackend):
    pass


class DdpUnderDistAutograd(ddp_under_dist_autograd_test.DdpUnderDistAutogradTest, OverRpc):
    pass


class DdpComparison(ddp_under_dist_autograd_test.DdpComparisonTest, OverRpc):
    pass


class Rpc(RpcTest, OverRpc):
    pass


class TensorPipeRpc(TensorPipeAgentRpcTest, OverRpc):
    pass


class JitRpc(JitRpcTest, OverRpc):
    pass


class DistAutograd(DistAutogradTest, OverRpc):
    pass


class TensorPipeDistAutograd(TensorPipeAgentDistAutogradTest, OverRpc):
    pass


OVER_RPC = [DdpUnderDistAutograd, DdpComparison, Rpc, TensorPipeRpc, JitRpc, DistAutograd, TensorPipeDistAutograd]


def has_group(each, name, seen):
    """Whether a test, or a method that it calls, has a process group. Most tests of RPC do without: no backend is in them."""
    seen.add(name)
    source = inspect.getsource(inspect.unwrap(getattr(each, name)))
    if re.search(r"initialize_pg|init_process_group|dist\.barrier", source):
        return True
    called = set(re.findall(r"self\.(_\w+|\w+_helper)\(", source)) - seen
    return any(inspect.isfunction(getattr(each, other, None)) and has_group(each, other, seen) for other in called)


def names_of_tests():
    loader = unittest.TestLoader()
    names = [f"Suite.{name}" for name in loader.getTestCaseNames(Suite)]
    if RANKS == 2:
        names += [f"{each.__name__}.{name}" for each in OVER_RPC for name in loader.getTestCaseNames(each)
                  if has_group(each, name, set())]
    return names


def run_in_child(name, backend, environment, log):
    os.setsid()
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ.update(environment, SUITE_BACKEND=backend)
    os.chdir(os.environ["TEMP_DIR"])
    unittest.main(module="__main__", argv=["suite", "-v", name])


def outcome_of(status, output):
    if status == 0:
        skipped = [line for line in output.splitlines() if "skipped '" in line or 'skipped "' in line]
        return ("skipped", skipped[0].split("skipped ")[1].strip("'\"")) if skipped else ("passed", "")
    lines = [line.strip() for line in output.splitlines()]
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception")) and ": " in line]
    # What the parent says of its ranks says nothing.
    telling = [line for line in errors if "exited with error code" not in line] or errors or lines or ["?"]
    return "failed", telling[0][:300]


def run(name, backend, limit):
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w+") as log:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        environment = {"TEMP_DIR": folder, "MASTER_PORT": str(port), "CHORALE_FLIGHT_DIR": folder}
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run_in_child(name, backend, environment, log)
            except SystemExit as end:
                status = int(end.code)
            finally:
                os._exit(status)
        deadline = time.monotonic() + limit
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.02)
        try:
            os.killpg(child, signal.SIGKILL)  # ranks that were left behind too
        except ProcessLookupError:
            pass
        log.seek(0)
        output = log.read()
        if done == (0, 0):
            os.waitpid(child, 0)
            return "hung", f"not done after {limit} s", output
        return *outcome_of(os.waitstatus_to_exitcode(done[1]), output), output


def main():
    print(json.dumps(names_of_tests()), flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        outcome, reason, output = run(wanted["test"], wanted["backend"], wanted["limit"])
        print(json.dumps({"outcome": outcome, "reason": reason, "output": output[-20000:]}), flush=True)


if __name__ == "__main__":
    main()
