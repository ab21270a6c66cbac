"""For tests that start processes."""
import pathlib
import time

LIMIT_S = 60


def wait_until(condition, what, limit_s=LIMIT_S):
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {limit_s} s: {what}")
        time.sleep(0.02)


def has_taken(pid, number):
    """Whether the process has taken every signal of this number that it was sent: while one waits, a second is lost in it."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return not any(signals >> (number - 1) & 1 for signals in pending)


def alive(pid):
    """Whether it runs; one that has ended and that nobody has waited for does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
