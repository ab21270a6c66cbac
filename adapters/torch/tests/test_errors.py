"""What goes wrong is told with the culprit."""

import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks, run_ranks


@on_ranks(2)
def test_different_calls(rank, size):
    with pytest.raises(dist.DistBackendError) as error:
        if rank == 0:
            dist.all_reduce(torch.ones(10))
        else:
            dist.all_reduce(torch.ones(11))
    text = str(error.value)
    assert "10 f32" in text and "11 f32" in text and "rank 0" in text and "rank 1" in text, text


@on_ranks(2)
def test_a_save_in_the_background_that_shares_a_group_is_named(rank, size):
    dist.all_reduce(torch.ones(10))
    with pytest.raises(dist.DistBackendError) as error:
        in_background = threading.Thread(target=dist.barrier)
        in_background.start()
        in_background.join()
        if rank == 0:
            dist.all_reduce(torch.ones(10))
        else:
            dist.broadcast(torch.ones(10), 0)
    text = str(error.value)
    assert f"rank {rank} makes the calls of this group from several threads: thread " in text, text
    assert "(async_save), needs a group of its own" in text, text


def test_a_killed_rank_is_named():
    def body(rank, size):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError) as error:
            dist.all_reduce(torch.ones(10))
        assert "rank 1" in str(error.value), str(error.value)
        return time.monotonic() - start

    seconds = run_ranks(body, 3, may_die=[1])
    assert seconds[0] < 10 and seconds[2] < 10


@on_ranks(4)
def test_groups_name_the_ranks_of_the_job(rank, size):
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        with pytest.raises(dist.DistBackendError) as error:
            dist.all_reduce(torch.ones(rank), group=group)
        text = str(error.value)
        assert "rank 1" in text and "rank 3" in text and "rank 0" not in text, text


@on_ranks(2)
def test_nobody_comes(rank, size):
    group = dist.new_group(timeout=datetime.timedelta(milliseconds=300))
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 1"):
            dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()


@on_ranks(2)
def test_futures_fail_too(rank, size):
    group = dist.new_group(timeout=datetime.timedelta(milliseconds=300))
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 1"):
            dist.all_reduce(torch.ones(100_000), group=group, async_op=True).get_future().wait()
    dist.barrier()


@on_ranks(2)
def test_bad_arguments(rank, size):
    with pytest.raises(RuntimeError, match="cannot be reduced"):
        dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError):
        dist.all_to_all_single(torch.empty(4), torch.empty(4), [1, 1], [2, 2])
    # Nothing of this was a call: the group goes on.
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x[0] == 2


@on_ranks(3)
def test_monitored_barrier_names_the_missing_rank(rank, size):
    if rank == 2:
        time.sleep(1)
        return
    with pytest.raises(RuntimeError, match="rank 2" if rank == 0 else "rank 0"):
        dist.monitored_barrier(timeout=datetime.timedelta(milliseconds=200))
