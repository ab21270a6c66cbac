#!/usr/bin/env python3
"""Groups over MPI, with ranks that mpirun starts.

  mpi_test.py BIN      BIN is the folder of the built programs
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import unittest

from unittest_main import main

BIN = pathlib.Path(sys.argv.pop(1)).resolve()
LIMIT_S = 120


def built():
    doctor = subprocess.run([BIN / "chorale", "doctor"], capture_output=True, text=True, check=True)
    return re.search(r"^\s+MPI .* yes$", doctor.stdout, re.MULTILINE) and shutil.which("mpirun")


def mpirun(ranks, *command, **variables):
    return subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), *command], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S,
                          env=dict(os.environ, **variables))


@unittest.skipUnless(built(), "no mpirun, or built without Open MPI")
class MpiGroups(unittest.TestCase):
    def run_tests(self, ranks, tests, **variables):
        """Every rank runs these tests of comm, all of which pass."""
        result = mpirun(ranks, str(BIN / "comm_test"), "--gtest_also_run_disabled_tests", "--gtest_brief=1",
                        "--gtest_color=no", "--gtest_filter=" + tests, **variables)
        passed = re.findall(r"^\[  PASSED  \] (\d+) test", result.stdout, re.MULTILINE)
        self.assertNotIn("FAILED", result.stdout)
        # A test of another number of ranks than these would do nothing.
        self.assertNotIn("Skipped", result.stdout)
        self.assertEqual(len(passed), ranks, result.stdout)
        self.assertNotIn("0", passed, "no test of that name")
        return result

    def test_every_collective_dtype_and_size_is_exact(self):
        for ranks in 2, 3:
            result = self.run_tests(ranks, "Exactness.EveryCollectiveAmongThreads:AllReduce.*")
            self.assertEqual(result.returncode, 0, result.stdout)

    def test_data_beyond_what_mpi_can_count_moves_in_pieces(self):
        self.run_tests(2, "Exactness.EveryCollectiveAmongThreads", CHORALE_TEST_MPI_PIECE=str(1 << 20))

    def test_uneven_chunks_objects_and_several_tensors_at_once(self):
        self.run_tests(4, "Collectives.AllGather*:Collectives.AllToAllOfOneTensor:Collectives.SparseAllReduce:"
                          "Collectives.CoalescingScope:Messages.BatchesOfBothDirections")
        self.run_tests(6, "Objects.*")
        self.run_tests(2, "Messages.AreReceivedInAnyOrderOfTags:Messages.GoOnBesideCollectives:"
                          "Groups.WaitsOfTwoGroupsInDifferentOrders:Groups.ThreadsOfOneRank")

    def test_every_call_is_one_event(self):
        self.run_tests(3, "RankOfMpirunEvents.*")

    def test_failures_are_named_on_every_rank(self):
        # Some of them leave a call in flight: mpirun then complains that MPI was not finalised.
        for ranks in 2, 3:
            self.run_tests(ranks, "RankOfMpirun.*")

    def test_a_killed_rank_ends_the_job(self):
        start = time.monotonic()
        result = mpirun(2, str(BIN / "comm_test"), "--gtest_also_run_disabled_tests",
                        "--gtest_filter=KilledRankOfMpirun.*")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("signal 9", result.stdout)
        self.assertLess(time.monotonic() - start, 20)

    def test_on_several_hosts_rank_0_makes_the_secret_and_mpi_tells_the_others(self):
        # The others only pretend to be elsewhere.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CHORALE_SECRET")}
        result = subprocess.run(
            ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", "env", "OMPI_COMM_WORLD_LOCAL_SIZE=1",
             "OMPI_COMM_WORLD_LOCAL_RANK=0", str(BIN / "transport_test"), "--gtest_also_run_disabled_tests",
             "--gtest_filter=RankOfALauncher.*"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=LIMIT_S, env=dict(environment, CHORALE_IFACE="lo"))
        self.assertEqual(result.returncode, 0, result.stdout)
        for rank in range(3):
            self.assertIn(f"rank {rank} of 3:" + " | 127.0.0.1 0 of 1" * 3, result.stdout)

    def test_training_over_mpi_by_a_variable(self):
        result = mpirun(2, str(BIN / "examples" / "train_ddp"), CHORALE_FABRIC="mpi")
        self.assertEqual(result.returncode, 0, result.stdout)


if __name__ == "__main__":
    main()
