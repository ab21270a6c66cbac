"""How the tests of this folder begin and end: without the variables of a launcher or a user's shell that change what programs do, and as
unittest.main does, except that ctest is told when something was skipped."""
import os
import pathlib
import sys
import unittest

SKIPPED = 77  # ctest calls it skipped
# The same variables stand in src/chorale/testing/test_main_test_util.cc.
FORGOTTEN = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CHORALE_STORE", "CHORALE_DEBUG", "TORCH_DISTRIBUTED_DEBUG")
FORGOTTEN_PREFIXES = ("OMPI_COMM_WORLD_", "OMPI_MCA_ess_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_")


def forget_the_surroundings():
    for name in list(os.environ):
        if name in FORGOTTEN or name.startswith(FORGOTTEN_PREFIXES):
            del os.environ[name]


forget_the_surroundings()  # when a test imports this, before it starts anything


def main():
    """Runs the tests of the file that is executed, or those named on the command line behind the folder of the programs. Exits with
    77 if none failed and some were skipped, each with its reason."""
    words = [word for word in sys.argv if not pathlib.Path(word).is_dir()]
    result = unittest.main(argv=words, verbosity=0, exit=False).result
    for test, reason in result.skipped:
        print(f"skipped: {test}: {reason}", file=sys.stderr)
    if not result.wasSuccessful():
        sys.exit(1)
    sys.exit(SKIPPED if result.skipped else 0)
