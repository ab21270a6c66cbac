"""Every operation of torch.distributed on CPU tensors."""

import datetime
import threading
import time

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks, run_ranks

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
OTHERS = [torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn]  # moved, not reduced


def values(dtype, rank, count=5):
    numbers = torch.arange(count) + 1 + rank
    if dtype == torch.bool:
        return numbers % 2 == 0
    return (numbers * (1 + 1j)).to(dtype) if dtype.is_complex else numbers.to(dtype)


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (a, b)


@on_ranks(3)
def test_reductions_of_every_dtype(rank, size):
    for dtype in INTEGERS + FLOATS + COMPLEX:
        all_values = [values(dtype, r) for r in range(size)]
        wide = torch.complex128 if dtype.is_complex else torch.float64
        sums = sum(v.to(wide) for v in all_values)
        for reduction, expected in ((dist.ReduceOp.SUM, sums), (dist.ReduceOp.AVG, sums / size)):
            if reduction == dist.ReduceOp.AVG and dtype in INTEGERS:
                continue
            x = values(dtype, rank)
            dist.all_reduce(x, reduction)
            assert torch.allclose(x.to(wide), expected, rtol=1e-2), (dtype, reduction, x)
        x = values(dtype, rank)
        dist.reduce(x, 1)
        if rank == 1:
            same(x, sums.to(dtype))
        if dtype.is_complex:
            continue
        stacked = torch.stack([v.to(wide) for v in all_values])
        for reduction, expected in ((dist.ReduceOp.MIN, stacked.amin(0)), (dist.ReduceOp.MAX, stacked.amax(0)),
                                    (dist.ReduceOp.PRODUCT, stacked.prod(0))):
            x = values(dtype, rank)
            dist.all_reduce(x, reduction)
            if reduction != dist.ReduceOp.PRODUCT or dtype not in (torch.uint8, torch.int8):
                same(x, expected.to(dtype))


@on_ranks(3)
def test_bits_and_bool(rank, size):
    for reduction, expected in ((dist.ReduceOp.BAND, 0), (dist.ReduceOp.BOR, 3), (dist.ReduceOp.BXOR, 0)):
        x = torch.tensor([rank + 1], dtype=torch.int32)  # 1, 2, 3
        dist.all_reduce(x, reduction)
        assert x.item() == expected
    for reduction, expected in ((dist.ReduceOp.MIN, [False, True]), (dist.ReduceOp.MAX, [True, True])):
        x = torch.tensor([rank == 1, True])
        dist.all_reduce(x, reduction)
        same(x, torch.tensor(expected))


@on_ranks(3)
def test_moving_every_dtype(rank, size):
    for dtype in INTEGERS + FLOATS + COMPLEX + OTHERS:
        everybody = [values(dtype, r) if dtype not in (torch.float8_e4m3fn,) else values(torch.float32, r).to(dtype)
                     for r in range(size)]
        own = everybody[rank].clone()
        x = own.clone()
        dist.broadcast(x, 2)
        same(x, everybody[2])
        gathered = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(gathered, own)
        for r in range(size):
            same(gathered[r], everybody[r])
        if dtype.is_complex:  # PyTorch views them as real numbers for lists only
            continue
        flat = torch.empty(size * 5, dtype=dtype)
        dist.all_gather_into_tensor(flat, own)
        same(flat, torch.cat([v.view(torch.uint8) for v in everybody]).view(dtype))
        dist.gather(own, gathered if rank == 0 else None, 0)
        flat.view(torch.uint8).zero_()
        dist.gather_single(own, flat if rank == 2 else None, 2)
        if rank == 2:
            same(flat, torch.cat([v.view(torch.uint8) for v in everybody]).view(dtype))
        dist.scatter(x, everybody if rank == 1 else None, 1)
        same(x, everybody[rank])
        outputs = [torch.empty_like(own) for _ in range(size)]
        dist.all_to_all(outputs, everybody)
        for r in range(size):
            same(outputs[r], everybody[rank])
        if rank == 0:
            dist.send(own, 1)
        elif rank == 1:
            assert dist.recv(x, 0) == 0
            same(x, everybody[0])


@on_ranks(3)
def test_uneven_sizes(rank, size):
    gathered = [torch.full((r + 1,), -1.0) for r in range(size)]
    dist.all_gather(gathered, 10.0 * rank + torch.arange(rank + 1))
    assert [g.tolist() for g in gathered] == [[0], [10, 11], [20, 21, 22]]
    # Rank r sends s + 1 rows to rank s: row 0, rows 1 and 2, rows 3 to 5.
    inputs = [100.0 * r + torch.arange(12.0).view(6, 2) for r in range(size)]
    y = torch.full((size * (rank + 1), 2), -1.0)
    dist.all_to_all_single(y, inputs[rank], [rank + 1] * size, [1, 2, 3])
    begin = [0, 1, 3][rank]
    assert torch.equal(y, torch.cat([x[begin:begin + rank + 1] for x in inputs]))
    even = torch.full((size, 2), -1.0)
    dist.all_to_all_single(even, inputs[rank][:size].contiguous())
    assert torch.equal(even, torch.stack([x[rank] for x in inputs]))


@on_ranks(2)
def test_views_that_are_not_contiguous(rank, size):
    base = torch.zeros(4, 6)
    base[:, ::2] = rank + 1
    dist.all_reduce(base[:, ::2])
    assert torch.equal(base[:, ::2], torch.full((4, 3), 3.0)) and base[:, 1::2].count_nonzero() == 0
    x = torch.arange(6.0).view(2, 3).t() + rank
    dist.broadcast(x, 1)
    assert torch.equal(x, torch.arange(6.0).view(2, 3).t() + 1)
    if rank == 0:
        dist.send(base.t(), 1)
    else:
        y = torch.empty(6, 4)
        dist.recv(y, 0)
        assert torch.equal(y, base.t())


@on_ranks(2)
def test_reduce_scatter_in_all_forms(rank, size):
    x = torch.arange(8.0).view(4, 2) * (rank + 1)
    y = torch.empty(2, 2)
    dist.reduce_scatter_tensor(y, x)
    assert torch.equal(y, (torch.arange(8.0).view(4, 2) * 3)[2 * rank:2 * rank + 2])
    dist.reduce_scatter(y, list((x * 2).chunk(2)), dist.ReduceOp.AVG)
    assert torch.equal(y, (torch.arange(8.0).view(4, 2) * 3)[2 * rank:2 * rank + 2])
    # The call has a factor of its own, as FSDP's have.
    z = torch.ones(4)
    dist.all_reduce(z, dist._make_nccl_premul_sum(0.25))
    assert torch.equal(z, torch.full((4,), 0.5))


@on_ranks(2)
def test_several_at_once(rank, size):
    xs = [torch.full((n,), float(rank + 1)) for n in (1, 10, 5000)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    assert all(torch.equal(x, torch.full_like(x, 3)) for x in xs)
    ys = [torch.empty(2 * x.numel()) for x in xs]
    with dist._coalescing_manager() as manager:
        for y, x in zip(ys, xs):
            dist.all_gather_into_tensor(y, x)
    assert all(torch.equal(y, torch.full_like(y, 3)) for y in ys)
    outputs = [[torch.empty_like(x) for x in xs] for _ in range(size)]
    dist.all_gather_coalesced(outputs, xs)
    assert all(torch.equal(a, b) for part in outputs for a, b in zip(part, xs))


@on_ranks(2)
def test_sparse_sums(rank, size):
    x = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (4,))
    dist.all_reduce(x)
    assert x.to_dense().tolist() == [2, 2, 2, 0]
    future = dist.all_reduce(x, async_op=True).get_future()
    assert future.wait()[0].to_dense().tolist() == [4, 4, 4, 0]  # by itself: nobody waits for the work
    empty = torch.sparse_coo_tensor((3, 2))
    dist.all_reduce(empty)
    assert empty.to_dense().count_nonzero() == 0


@on_ranks(3)
def test_messages(rank, size):
    if rank == 0:
        senders = []
        for _ in range(2):
            x = torch.empty(3)
            sender = dist.recv(x)
            assert torch.equal(x, torch.full((3,), float(sender)))
            senders.append(sender)
        assert sorted(senders) == [1, 2]
    else:
        dist.send(torch.full((3,), float(rank)), 0)
    # Messages are told apart by their tags, not by the order in which they were sent; these are larger than what
    # travels at once.
    if rank == 1:
        works = [dist.isend(torch.full((100_000,), float(tag)), 2, tag=tag) for tag in (7, 8)]
    elif rank == 2:
        x, y = torch.empty(100_000), torch.empty(100_000)
        works = [dist.irecv(x, 1, tag=8), dist.irecv(y, 1, tag=7)]
    else:
        works = []
    for work in works:
        work.wait()
    if rank == 2:
        assert x[0] == 8 and y[-1] == 7
    neighbours = (rank - 1) % size, (rank + 1) % size
    inbox = torch.empty(4)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.full((4,), float(rank)), neighbours[1]),
                                        dist.P2POp(dist.irecv, inbox, neighbours[0])]):
        work.wait()
    assert inbox[0] == neighbours[0]


@on_ranks(2)
def test_works_and_futures(rank, size):
    x = torch.ones(1000)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future().then(lambda f: f.value()[0].sum().item())
    assert future.wait() == 2000  # by itself: nobody waits for the work
    assert work.is_completed() and work.is_success() and torch.equal(work.result()[0], x)
    # A message that nobody sends holds up nothing that is started after it.
    inbox = torch.empty(1)
    pending = dist.irecv(inbox, 1 - rank, tag=9)
    assert dist.all_reduce(x, async_op=True).get_future().wait()[0][0] == 4
    assert not pending.is_completed()
    dist.barrier()
    dist.send(torch.tensor([5.0]), 1 - rank, tag=9)
    pending.wait()
    assert inbox.item() == 5
    dist.barrier()
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=10))


@on_ranks(2)
def test_a_work_may_be_asked_while_python_follows_from_it(rank, size):
    if rank == 1:
        dist.recv(torch.empty(1), 0)
        dist.send(torch.ones(1), 0)
        return
    follows = threading.Event()

    def follow(future):
        follows.set()
        time.sleep(0.2)  # lets the other thread go on, which then has the interpreter

    work = dist.irecv(torch.empty(1), 1)
    followed = work.get_future().then(follow)
    dist.send(torch.ones(1), 1)
    assert follows.wait(30) and work.is_completed()
    followed.wait()


@on_ranks(3)
def test_groups_of_some_ranks(rank, size):
    pair = dist.new_group([0, 2], timeout=datetime.timedelta(seconds=20))
    if rank in (0, 2):
        x = torch.tensor([float(rank)])
        dist.broadcast(x, 2, group=pair)
        assert x.item() == 2
        dist.all_reduce(x, group=pair)
        assert x.item() == 4
        if rank == 2:
            dist.send(torch.tensor([7.0]), 0, group=pair)
        else:
            assert dist.recv(x, group=pair) == 2 and x.item() == 7
        dist.destroy_process_group(pair)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [o["rank"] for o in objects] == [0, 1, 2]


@on_ranks(2)
def test_profiler_names_our_calls(rank, size):
    with torch.profiler.profile() as profiler:
        dist.all_reduce(torch.ones(10))
    assert any(event.key == "chorale:all_reduce" for event in profiler.key_averages())


@pytest.mark.parametrize("megabytes", [0.004, 1, 16])
def test_sizes_of_messages(megabytes):
    def body(rank, size):
        count = int(megabytes * 1024 * 1024 / 4)
        x = torch.full((count,), float(rank + 1))
        foreign = torch.from_numpy(torch.full((count,), float(rank + 1)).numpy().copy())  # not from our allocator
        for tensor in (x, foreign):
            dist.all_reduce(tensor)
            assert tensor.min() == tensor.max() == 3

    run_ranks(body)


@on_ranks(2)
def test_one_backend_per_kind_of_device(rank, size):
    group = dist.new_group(backend="cpu:chorale,cuda:gloo")  # nccl needs a GPU
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2, 2, 2]
    with pytest.raises(dist.DistBackendError, match="different calls"):  # what only ours says
        dist.all_reduce(torch.ones(1 + rank), group=group)


@on_ranks(3)
def test_averages_of_integers_are_cut_towards_zero(rank, size):
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        sign = 1 if dtype == torch.uint8 else -1
        start = torch.tensor([rank, 3 * rank + 1, sign * (rank + 1) * 5], dtype=dtype)  # sums 3, 12, ±30; the first rank's 0, 1, ±5
        x = start.clone()
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert x.tolist() == [1, 4, sign * 10], x
        x = start + 1
        work = dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True)
        assert work.get_future().wait()[0].tolist() == [2, 5, 11 if sign > 0 else -9], x
    x = torch.tensor([-(rank + 1) * 2 - (rank == 0)])  # -3, -4, -6: -13 / 3
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.item() == -4
    x = torch.tensor([7 * rank])
    dist.reduce(x, 1, dist.ReduceOp.AVG)
    assert rank != 1 or x.item() == 7
    part = torch.empty(1, dtype=torch.int64)
    dist.reduce_scatter_tensor(part, torch.tensor([rank, 10 * rank, 100 * rank]), dist.ReduceOp.AVG)
    assert part.item() == [1, 10, 100][rank]
    with dist._coalescing_manager(async_ops=True) as works:
        for y in (several := [torch.tensor([3 * rank + i]) for i in range(4)]):
            dist.all_reduce(y, dist.ReduceOp.AVG)
    works.wait()
    assert [y.item() for y in several] == [3, 4, 5, 6]


@on_ranks(4)
def test_split_groups_and_options(rank, size):
    half = dist.split_group(split_ranks=[[0, 3], [1, 2]])
    x = torch.tensor([10.0 ** rank])
    dist.all_reduce(x, group=half)
    assert x.item() == (1001 if rank in (0, 3) else 110)
    assert dist.get_process_group_ranks(half) == ([0, 3] if rank in (0, 3) else [1, 2])
    some = dist.split_group(split_ranks=[[1, 2, 3]])
    if rank > 0:
        x = torch.tensor([rank])
        dist.all_reduce(x, group=some)
        assert x.item() == 6
    options = dist.distributed_c10d.C10DBackend.Options("chorale", datetime.timedelta(milliseconds=300))
    hasty = dist.new_group(pg_options=options)
    if rank == 0:
        with pytest.raises(RuntimeError, match="timed out"):
            dist.all_reduce(x, group=hasty)
    with pytest.raises(TypeError, match="pg_options"):
        dist.new_group(pg_options="fast")
    dist.barrier()
