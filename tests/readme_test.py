"""The programs that README.md shows are examples that are built and run."""
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Readme(unittest.TestCase):
    def test_programs_are_examples(self):
        shown = re.findall(r"```cpp\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
        examples = [path.read_text() for path in (ROOT / "examples").glob("*.cc")]
        self.assertTrue(shown)
        for program in shown:
            self.assertTrue(any(program in text for text in examples), "not in any example:\n" + program)


if __name__ == "__main__":
    unittest.main(argv=["readme_test"])
