"""What PyTorch builds on its process groups, on ours: equal to the same training on one rank."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ranks import on_ranks, run_ranks


def make_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def part(tensor, rank, size):
    return tensor.chunk(size)[rank]


def train_alone(net, steps=5, make=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)):
    optimizer = make(net.parameters())
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return net


def train(wrapped, rank, size, optimizer=None, steps=5):
    optimizer = optimizer or torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        x, y = (part(t, rank, size) for t in batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()


def assert_same(a, b, tolerance=1e-6):
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True},
                                     {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001}])
def test_ddp_equals_one_rank(options):
    def body(rank, size):
        ddp = DistributedDataParallel(make_net(), **options)
        train(ddp, rank, size)
        assert_same(ddp.module, train_alone(make_net()))

    run_ranks(body)


@pytest.mark.parametrize("hook", ["allreduce", "fp16", "bf16", "powersgd"])
def test_ddp_hooks(hook):
    def body(rank, size):
        ddp = DistributedDataParallel(make_net())
        if hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            ddp.register_comm_hook(None, {"allreduce": default_hooks.allreduce_hook,
                                          "fp16": default_hooks.fp16_compress_hook,
                                          "bf16": default_hooks.bf16_compress_hook}[hook])
        train(ddp, rank, size)
        assert_same(ddp.module, train_alone(make_net()), 1e-6 if hook == "allreduce" else 5e-2)

    run_ranks(body)


@on_ranks(2)
def test_ddp_accumulates_without_synchronizing(rank, size):
    ddp = DistributedDataParallel(make_net())
    for step in range(2):
        x, _ = (part(t, rank, size) for t in batch(step))
        with ddp.no_sync() if step == 0 else contextlib.nullcontext():
            ddp(x).sum().backward()
    alone = make_net()
    for step in range(2):
        (alone(batch(step)[0]).sum() / size).backward()
    for p, q in zip(ddp.module.parameters(), alone.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_operations_that_free_memory_by_its_address(rank, size):
    x = torch.randn(64, 1024, requires_grad=True)  # oneDNN's gelu
    y = nn.functional.gelu(x)
    y.sum().backward()
    torch.testing.assert_close(y, x * 0.5 * (1 + torch.erf(x / 2 ** 0.5)), rtol=1e-4, atol=1e-5)
    dist.all_reduce(x.grad)


@on_ranks(3)
def test_ranks_with_different_numbers_of_batches(rank, size):
    ddp = DistributedDataParallel(make_net())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    with Join([ddp]):
        for step in range(2 + rank):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
    weights = [torch.empty_like(ddp.module[0].weight) for _ in range(size)]
    dist.all_gather(weights, ddp.module[0].weight.detach())
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


@on_ranks(2)
def test_fsdp2_equals_one_rank(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = make_net()
    mesh = init_device_mesh("cpu", (size,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, rank, size)
    alone = train_alone(make_net())
    for p, q in zip(net.parameters(), alone.parameters()):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_dtensor_and_tensor_parallel(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(24.0).view(6, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    product = sharded.t() @ sharded  # partial sums, reduced when asked for
    assert torch.equal(product.redistribute(mesh, [Replicate()]).to_local(), whole.t() @ whole)
    assert isinstance(product, DTensor)
    net = parallelize_module(make_net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(5):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    alone = train_alone(make_net())
    for p, q in zip(net.parameters(), alone.parameters()):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_zero_redundancy_optimizer(rank, size):
    ddp = DistributedDataParallel(make_net())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)
    train(ddp, rank, size, optimizer)
    assert_same(ddp.module, train_alone(make_net(), make=lambda p: torch.optim.AdamW(p, lr=0.01)), 1e-5)
    optimizer.consolidate_state_dict(0)
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == 4


def test_distributed_checkpoint(tmp_path):
    from torch.distributed import checkpoint

    def body(rank, size):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (size,))
        state = {"weight": distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)]), "step": 7}
        checkpoint.save(copy.deepcopy(state), checkpoint_id=tmp_path / "saved")
        state["weight"].zero_()
        state["step"] = 0
        checkpoint.load(state, checkpoint_id=tmp_path / "saved")
        assert torch.equal(state["weight"].full_tensor(), torch.arange(12.0).view(6, 2)) and state["step"] == 7

    run_ranks(body)


@on_ranks(2)
def test_data_loader_with_forked_workers(rank, size):
    dataset = torch.utils.data.TensorDataset(torch.arange(64.0).view(32, 2))
    base = torch.full((100_000,), float(rank))  # the workers inherit it as a private copy
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2)
    total = torch.zeros(2)
    for (rows,) in loader:
        total += rows.sum(0)
        dist.all_reduce(base)  # peers write here while workers live
    assert torch.equal(total, dataset.tensors[0].sum(0))
    assert base[0] == base[-1] == 2 ** 7
