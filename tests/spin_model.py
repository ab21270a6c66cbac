"""For tests of the models in docs/dev (*.pml), which spin searches for errors."""
import pathlib
import subprocess
import tempfile


class Model:
    def __init__(self, name):
        self.text = (pathlib.Path(__file__).resolve().parent.parent / "docs/dev" / name).read_text()

    def mutated(self, old, new):
        """The text with one thing changed."""
        assert self.text.count(old) == 1, old
        return self.text.replace(old, new)


def search(text, *options):
    """The number of errors that spin finds."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "model.pml").write_text(text)
        run = subprocess.run(["spin", *options, "-search", "model.pml"], cwd=folder, capture_output=True, text=True,
                             timeout=250)
        assert "max search depth too small" not in run.stdout, "the search was not exhaustive"
        lines = [line for line in run.stdout.splitlines() if "errors:" in line]
        assert len(lines) == 1, run.stdout + run.stderr
        return int(lines[0].split("errors:")[1])
