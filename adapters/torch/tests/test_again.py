"""Groups that are made and destroyed again and again with one store: never another group's sums. Under torchrun that is
in test_start.py."""

import datetime
import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks

ROUNDS = 20
LIMIT = datetime.timedelta(seconds=60)


def check_sums(rank, size, base, reduce):
    """Sums that no other round computes: a partner from another one shows."""
    for count in (1, 5000):
        x = torch.arange(count) * (rank + 1) + base
        reduce(x)
        assert torch.equal(x, torch.arange(count) * (size * (size + 1) // 2) + size * base), (base, x[0])


@pytest.mark.parametrize("kind", ["file://", "one file, opened anew", "one store"])
def test_groups_are_made_again(tmp_path, kind):
    def body(rank, size):
        dist.destroy_process_group()
        kept = dist.FileStore(f"{tmp_path}/kept", size)
        for round in range(ROUNDS + 1):
            where = {"store": kept} if kind == "one store" else {"init_method": f"file://{tmp_path}/file"}
            if kind == "one file, opened anew":
                where = {"store": dist.FileStore(f"{tmp_path}/anew", size)}
            dist.init_process_group("chorale", rank=rank, world_size=size, timeout=LIMIT, **where)
            check_sums(rank, size, 1000 * round, dist.all_reduce)
            if round < ROUNDS:  # the last one is destroyed by run_ranks
                dist.destroy_process_group()

    run_ranks(body, limit_s=120)


def test_groups_are_made_again_at_a_master_without_an_agent():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def body(rank, size):
        dist.destroy_process_group()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        for round in range(ROUNDS + 1):
            dist.init_process_group("chorale", timeout=LIMIT)
            check_sums(rank, size, 1000 * round, dist.all_reduce)
            if round < ROUNDS:
                held = dist.distributed_c10d._get_default_store()
                dist.destroy_process_group()
                time.sleep(0.01 if rank == 0 else 0)  # the others find the old store, which rank 0 is about to end
                del held

    run_ranks(body, size=3, limit_s=120)


def test_groups_are_made_again_at_a_hash_store():
    from chorale_torch import _C

    store, size, failures = dist.HashStore(), 2, []  # ranks are threads: such a store is known to one process

    def work(rank):
        try:
            for round in range(ROUNDS):
                backend = _C.make_backend(store, rank, size, LIMIT.total_seconds(), [])
                check_sums(rank, size, 1000 * round, lambda x: backend.allreduce([x]).wait())
                backend.shutdown()
        except BaseException as error:
            failures.append((rank, error))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures and not any(thread.is_alive() for thread in threads), failures
