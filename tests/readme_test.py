"""The whole programs that README.md and docs/usage show are examples that are built and run, and examples are short.
Other code blocks of docs/usage are compiled and run by themselves (tests/snippets)."""
import pathlib
import re
import unittest

from unittest_main import main

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Readme(unittest.TestCase):
    def test_programs_are_examples(self):
        examples = [path.read_text() for path in (ROOT / "examples").glob("*.cc")]
        for page in [ROOT / "README.md", *(ROOT / "docs/usage").glob("*.md")]:
            for code in re.findall(r"^```cpp\n(.*?)^```$", page.read_text(), re.S | re.M):
                if page.name == "README.md" or "int main(" in code:
                    self.assertTrue(any(code in text for text in examples), f"{page.name}: not in any example:\n{code}")

    def test_an_example_fits_on_a_screen_or_two(self):
        longer = {"pipeline": 150, "six_processes": 200}  # these check every number, too
        for path in (ROOT / "examples").glob("*.cc"):
            self.assertLess(len(path.read_text().splitlines()), longer.get(path.stem, 80), path.name)


if __name__ == "__main__":
    main()
