"""DistributedDataParallel for libtorch (ddp.h) against PyTorch's own in Python, on the same data."""

import os
import pathlib
import shutil
import subprocess

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks

BUILD = pathlib.Path(os.environ.get("CHORALE_TORCH_BUILD", pathlib.Path(__file__).parents[3] / "build" / "torch-cpp"))


def wave(sizes, start):
    """The same numbers as in ddp_test.cc."""
    count = torch.Size(sizes).numel()
    return torch.sin(torch.arange(count, dtype=torch.double) * 0.37 + start).float().view(sizes)


def twenty_steps(rank, size):
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 3))
    with torch.no_grad():
        for at, parameter in enumerate(net.parameters()):
            parameter.copy_(wave(parameter.shape, at + 1) * 0.3)
    gloo = dist.new_group(backend="gloo")
    ddp = nn.parallel.DistributedDataParallel(net, process_group=gloo)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    for step in range(20):
        optimizer.zero_grad()
        x, y = wave((4, 6), 10 + step + 0.5 * rank), wave((4, 3), 20 + step + 0.5 * rank)
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


@pytest.mark.skipif(not (BUILD / "ddp_test").exists(), reason=f"{BUILD}/ddp_test is not built (CMakeLists.txt)")
def test_twenty_steps_equal_those_of_python(tmp_path):
    launcher = os.environ.get("CHORALE", shutil.which("chorale"))
    if not launcher:
        pytest.skip("no chorale program: set CHORALE")
    subprocess.run([launcher, "run", "-n", "2", BUILD / "ddp_test", tmp_path / "parameters"], check=True, timeout=120,
                   env=dict(os.environ, CHORALE_FLIGHT_DIR=str(tmp_path)))
    ours = torch.tensor([float(line) for line in (tmp_path / "parameters").read_text().split()])
    theirs = torch.tensor(run_ranks(twenty_steps)[0])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    subprocess.run([launcher, "run", "-n", "2", BUILD / "train"], check=True, timeout=120)
