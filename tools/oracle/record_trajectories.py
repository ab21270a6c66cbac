"""Records how PyTorch trains the four benchmark models, as the independent judge of modules, gradients and AdamW together.

  python3 tools/oracle/record_trajectories.py      (PyTorch 2.15; see docs/dev/dependencies.md)

Weights and data are made by formulas (ops_oracle.Input), so that only losses and checksums of parameters and buffers are kept:
20 steps of AdamW (lr 1e-3, weight decay 0.01) on 20 different batches, in f32 and in f64. src/chorale/models/trajectory_test.cc does
the same and compares. Models are the benchmark's; the encoder sees 2 x 32 tokens instead of 8 x 128, for the test's time.
"""
import json
import math
import pathlib
import sys

import torch
import torch.nn.functional as F

from ops_oracle import DTYPES, Input

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "bench/peers"))
from torch_models import Encoder, cnn, mlp  # noqa: E402
STEPS = 20


# name: model, shape of the input (tokens where it has vocabulary), number of classes
MODELS = {
    "tinymlp": (lambda: mlp([20, 32, 10]), [8, 20], 10),
    "mlp512x4": (lambda: mlp([512] * 5 + [10]), [32, 512], 10),
    "cnn_fashion": (cnn, [32, 1, 28, 28], 10),
    "bert_256x4": (Encoder, [2, 32], 8192),
}


def fill(model):
    """Matrices in +-1 / sqrt(fan in), factors of norms in [0.5, 1.5), everything else in +-0.1."""
    with torch.no_grad():
        for k, (name, p) in enumerate(model.named_parameters()):
            bound = math.sqrt(p.shape[0] / p.numel()) if p.dim() > 1 else 0.1
            low, high = (0.5, 1.5) if p.dim() == 1 and name.endswith("weight") else (-bound, bound)
            p.copy_(Input(p.shape, "f64", 100 + k, low, high).tensor())


def train(name, dtype):
    make, shape, classes = MODELS[name]
    model = make().to(DTYPES[dtype])
    fill(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        if name == "bert_256x4":
            x = Input(shape, "i64", 1000 + step, 0, classes).tensor()
            target = x
        else:
            x = Input(shape, "f64", 1000 + step, -1.0, 1.0).tensor().to(DTYPES[dtype])
            target = Input(shape[:1], "i64", 2000 + step, 0, classes).tensor()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), target.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sums = {n: float(v.double().abs().sum()) for n, v in model.state_dict().items()}
    return {"losses": losses, "sums": sums}


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = {"torch": torch.__version__}
    for name in MODELS:
        result[name] = {dtype: train(name, dtype) for dtype in ["f32", "f64"]}
        result[name]["f32"].pop("sums")
        print(name, result[name]["f32"]["losses"][0], result[name]["f32"]["losses"][-1], result[name]["f64"]["losses"][-1])
    path = ROOT / "tests" / "oracle" / "trajectories.json"
    path.write_text(json.dumps(result, separators=(",", ":")).replace('},"', '},\n"') + "\n")
