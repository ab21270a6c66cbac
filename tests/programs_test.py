"""Commands that are programs of their own work as if `chorale` had them."""
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/debug/bin"


def run(program, *words):
    done = subprocess.run([program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


class Programs(unittest.TestCase):
    def test_words_status_and_output_are_those_of_the_other_program(self):
        for words in (["bench", "ops", "--only", "no such case"], ["bench", "--help"], ["bench", "ops", "--help"], ["bench"],
                      ["bench", "oops"]):
            with self.subTest(words):
                self.assertEqual(run(PROGRAMS / "chorale", *words), run(PROGRAMS / "chorale-bench", *words))

    def test_an_error_has_the_name_that_was_typed(self):
        code, out, err = run(PROGRAMS / "chorale", "bench", "oops")
        self.assertEqual((code, out), (2, ""))
        self.assertIn("chorale bench: no command 'oops'; did you mean 'ops'?", err)

    def test_help_of_a_command_of_it_is_its_own(self):
        code, out, _ = run(PROGRAMS / "chorale", "bench", "collectives", "--help")
        self.assertEqual(code, 0)
        self.assertIn("--most-bytes", out)

    def test_without_the_other_program_the_error_says_how_to_get_it(self):
        with tempfile.TemporaryDirectory() as folder:
            alone = pathlib.Path(folder) / "chorale"
            shutil.copy(PROGRAMS / "chorale", alone)
            code, _, err = run(alone, "bench", "ops")
        self.assertEqual(code, 1)
        self.assertIn("/chorale-bench cannot be started: No such file or directory", err)
        self.assertIn("`./chorale bench` builds it", err)


if __name__ == "__main__":
    unittest.main(argv=["programs_test"])
