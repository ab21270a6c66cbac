"""How the tests of this folder end: as unittest.main does, except that ctest is told when something was skipped."""
import pathlib
import sys
import unittest

SKIPPED = 77  # ctest calls it skipped


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
