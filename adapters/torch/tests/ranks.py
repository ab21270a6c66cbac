"""Runs functions on several ranks of the backend "chorale"."""

import datetime
import functools
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
import traceback

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
ADAPTER = pathlib.Path(__file__).resolve().parent.parent
if any((ADAPTER / "chorale_torch").glob("_C*.so")):  # built in place; else the installed package is meant
    sys.path.insert(0, str(ADAPTER))

import torch.distributed as dist  # noqa: E402
from torch.testing._internal import common_utils  # noqa: E402, F401  (once here, not in every rank)


def _rank_main(body, rank, size, folder, timeout_s, pipe):
    # Imported in the rank and not before: memory that a forked process inherits is private and cannot be mapped by
    # peers.
    import chorale_torch  # noqa: F401

    os.environ["CHORALE_FLIGHT_DIR"] = folder
    try:
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("chorale", store=store, rank=rank, world_size=size,
                                timeout=datetime.timedelta(seconds=timeout_s))
        result = body(rank, size)
        dist.destroy_process_group()
        pipe.send((result, None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def run_ranks(body, size=2, limit_s=60, timeout_s=30, may_die=()):
    """Results of body(rank, size) on each rank; None for those in may_die. A failure anywhere fails the test."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_rank_main, args=(body, rank, size, folder, timeout_s, there))
            process.start()
            there.close()
            ranks.append((process, here))
        deadline = time.monotonic() + limit_s
        results, errors = [], []
        for rank, (process, pipe) in enumerate(ranks):
            result, error = None, f"ended without a result, or not within {limit_s} s"
            try:
                if pipe.poll(max(0, deadline - time.monotonic())):
                    result, error = pipe.recv()
            except EOFError:
                pass
            if error and rank not in may_die:
                errors.append(f"rank {rank}: {error}")
            results.append(result)
        for process, _ in ranks:
            process.join(0 if errors else 10)
            process.kill()
            process.join()
        assert not errors, "\n".join(errors)
        return results


def on_ranks(size=2, **options):
    """The decorated test is a function of rank and size, run on every rank."""

    def decorate(body):
        @functools.wraps(body)
        def test():
            run_ranks(body, size, **options)

        del test.__wrapped__  # pytest must not see the parameters
        return test

    return decorate
