"""PyTorch's own distributed tests (torch.testing._internal.distributed.distributed_test) on the backend "chorale".

The suite decides by the backend's name what to run, so ours is presented under a name that it knows: PRESENT_AS is gloo,
or mpi for the operations that PyTorch expects of MPI only. Patched, and nothing else:
  - the creator registered for that name makes our backend;
  - for mpi: dist.is_mpi_available() says yes, and the feature tables list mpi wherever they list gloo;
  - the profiler's names of our events carry the presented name (CHORALE_TORCH_PROFILE_AS).
With SUITE_BACKEND=gloo nothing is patched and PyTorch's own backend runs, for comparison.
"""

import os

PRESENT_AS = os.environ.get("PRESENT_AS", "gloo")
os.environ.setdefault("BACKEND", PRESENT_AS)
os.environ.setdefault("CHORALE_TORCH_PROFILE_AS", PRESENT_AS)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

if os.environ.get("SUITE_BACKEND", "chorale") == "chorale":
    import chorale_torch

    def create(options, _backend_options=None):
        return chorale_torch.make_backend(options.store, options.group_rank, options.group_size, options.timeout)

    dist.Backend._plugins[PRESENT_AS.upper()] = dist.Backend._BackendPlugin(create, True)
    if PRESENT_AS == "mpi":
        from torch.testing._internal.common_distributed import DistTestCases

        dist.is_mpi_available = c10d.is_mpi_available = lambda: True
        for names in DistTestCases.backend_feature.values():
            if "gloo" in names:
                names.add("mpi")
        DistTestCases.skip_collective["allgather_coalesced"].discard("mpi")

from torch.testing._internal.common_utils import run_tests  # noqa: E402
from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)


class Suite(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()


if __name__ == "__main__":
    run_tests()
