"""One row of the table of hostile runs: how it is set up, run and judged."""
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
from typing import Any, Callable, Optional

LIMIT_S = 60  # for a row that says nothing else, on a machine that does other things too
TEXT = "the cat sat on the mat. " * 60
# A GPT that is trained in a moment.
TINY = ["--text", "text", "--tokenizer", "bytes", "--context", "16", "--layers", "1", "--heads", "1", "--width", "8", "--batch", "4",
        "--log-every", "1", "--sample-tokens", "4"]
RUN = ["--steps", "4", "--checkpoint-every", "2", "-n", "1", "--out", "run"]
# Signals that end a program by a fault of its own.
CRASHES = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGILL, -signal.SIGBUS, 128 + signal.SIGSEGV, 128 + signal.SIGABRT,
           128 + signal.SIGFPE, 128 + signal.SIGBUS}


@dataclasses.dataclass
class Row:
    """What is run: `words` after the name of the program, or `shell`, a script in which $C is the program and $B its folder. Bytes are words too.

    The working folder holds `text`, the files in `files` (None: a folder, a function: called with the path) and, with `trained`, the run
    of a small GPT in `run`. What must hold afterwards: the exit status, a pattern for each of `says` in the output, none of
    `never_says`, the time, that no file of before is gone or changed except those that `may_go` and `may_change` match, and that
    nothing is new but what `may_make` matches.
    """
    name: str
    words: Optional[list] = None
    shell: Optional[str] = None
    env: dict = dataclasses.field(default_factory=dict)
    files: dict = dataclasses.field(default_factory=dict)
    trained: bool = False
    act: Optional[Callable[["Running"], None]] = None
    status: Any = 1  # or a set of them
    says: tuple = ()
    never_says: tuple = ()
    within: float = LIMIT_S
    may_change: str = r"$^"
    may_make: str = r"$^"
    may_go: str = r"$^"
    check: Optional[Callable[[pathlib.Path], Optional[str]]] = None  # returns what is wrong
    may_abort: bool = False  # a program of a user's that catches no error
    ci: bool = True
    needs: Optional[Callable[[], Optional[str]]] = None  # returns why it cannot be run here


@dataclasses.dataclass
class Running:
    process: subprocess.Popen
    folder: pathlib.Path
    output: pathlib.Path

    def wait_for(self, condition, what, limit_s=30):
        end = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"it ended before {what}")
            if time.monotonic() > end:
                raise AssertionError(f"not within {limit_s} s: {what}")
            time.sleep(0.02)

    def said(self):
        return self.output.read_bytes().decode(errors="replace")

    def wait_for_file(self, name):
        """`name` may have a *: checkpoints come and go."""
        self.wait_for(lambda: any(self.folder.glob(name)), f"there was {name}")

    def ranks(self):
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"\0RANK=" in pathlib.Path(f"/proc/{pid}/environ").read_bytes()]


class Table:
    """Runs rows with the program in a folder."""

    def __init__(self, bin_folder):
        self.program = pathlib.Path(bin_folder).resolve() / "chorale"
        self.templates = tempfile.TemporaryDirectory(prefix="hostile-")
        self.trained = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.templates.cleanup()

    def prepare(self):
        """The run that rows get a copy of."""
        folder = pathlib.Path(self.templates.name)
        (folder / "text").write_text(TEXT)
        done = subprocess.run([self.program, "train", "gpt", *TINY, *RUN], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, env=clean({}))
        if done.returncode != 0:
            raise SystemExit(f"the run that rows start from failed:\n{done.stdout}{done.stderr}")
        self.trained = folder / "run"

    def run(self, row):
        """What is wrong, in words; nothing if the row holds. A row that cannot be run here is a SkippedRow."""
        if row.needs and (reason := row.needs()):
            raise SkippedRow(reason)
        place = tempfile.mkdtemp(prefix="hostile-")
        folder = pathlib.Path(place) / "work"
        try:
            folder.mkdir()
            self.fill(folder, row)
            return self.judge(row, folder, *self.execute(row, folder, pathlib.Path(place) / "output"))
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def fill(self, folder, row):
        (folder / "text").write_text(TEXT)
        if row.trained:
            shutil.copytree(self.trained, folder / "run")
        for name, content in row.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.mkdir()
            elif callable(content):
                content(path)
            else:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def execute(self, row, folder, output):
        command = ["bash", "-c", row.shell] if row.shell else [self.program, *row.words]
        before = snapshot(folder)
        start = time.monotonic()
        problem = None
        with open(output, "wb") as sink:
            process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                                       env=clean({"C": str(self.program), "B": str(self.program.parent), **row.env}), start_new_session=True)
            try:
                if row.act:
                    row.act(Running(process, folder, output))
                process.wait(max(0.1, row.within - (time.monotonic() - start)))
            except subprocess.TimeoutExpired:
                problem = f"still there after {row.within} s"
            except AssertionError as error:
                problem = str(error)
            finally:
                left = end_session(process)
        if not problem and left:
            problem = f"left behind: {left}"
        return before, process.returncode, output.read_bytes().decode(errors="replace"), problem

    def judge(self, row, folder, before, status, said, problem):
        problems = [problem] if problem else []
        allowed = row.status if isinstance(row.status, (set, frozenset)) else {row.status}
        if status not in allowed:
            problems.append(f"exit status {status} instead of {row.status}")
        if status in CRASHES - allowed or ("terminate called" in said and not row.may_abort):
            problems.append("a crash")
        problems += [f"does not say /{pattern}/" for pattern in row.says if not re.search(pattern, said)]
        problems += [f"says /{pattern}/" for pattern in row.never_says if re.search(pattern, said)]
        after = snapshot(folder)
        for name, state in before.items():
            if name not in after:
                problems += [] if re.fullmatch(row.may_go, name) else [f"{name} is gone"]
            elif after[name] != state and not re.fullmatch(row.may_change, name):
                problems.append(f"{name} has changed")
        problems += [f"{name} is new" for name in after if name not in before and not re.fullmatch(row.may_make, name)]
        try:
            problems += [wrong] if row.check and (wrong := row.check(folder)) else []
        except OSError as error:
            problems.append(str(error))
        return "" if not problems else "; ".join(problems) + "\n" + indented(said)


class SkippedRow(Exception):
    """Why a row cannot be run here."""


def indented(text):
    lines = text.splitlines()
    shown = lines if len(lines) <= 20 else lines[:10] + ["…"] + lines[-10:]
    return "".join(f"    {line[:300]}\n" for line in shown)


def clean(changes):
    """The environment, without what a launcher or a user of these tests may have set."""
    ours = ("CHORALE_", "TORCHELASTIC_", "OMPI_", "PMI_", "SLURM_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours) and name not in names}
    return {**kept, **changes}


def snapshot(folder):
    """Path → what is there. Folders count as themselves, not by what is in them."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = ("folder",)
        elif path.is_file():
            size = path.stat().st_size
            found[name] = ("file", size, path.read_bytes() if size < 1 << 24 else None)
        else:
            found[name] = ("special",)
    return found


def members(session):
    """The processes of a session that are alive."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]))
        except OSError:
            continue
    return found


def end_session(process):
    """Waits a moment for what the row started; ends and names what stays."""
    end = time.monotonic() + 3
    while process.poll() is not None and members(process.pid) and time.monotonic() < end:
        time.sleep(0.05)
    left = members(process.pid)
    for pid, _ in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()
    return [command for pid, command in left if pid != process.pid]
