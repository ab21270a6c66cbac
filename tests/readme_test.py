"""The programs that README.md shows are examples that are built and run, and examples are short."""
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

    def test_an_example_fits_on_a_screen_or_two(self):
        for path in (ROOT / "examples").glob("*.cc"):
            self.assertLess(len(path.read_text().splitlines()), 80, path.name)


if __name__ == "__main__":
    unittest.main(argv=["readme_test"])
