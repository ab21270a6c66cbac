"""Records how PyTorch trains the four benchmark models, as the independent judge of modules, gradients and AdamW together.

  python3 tools/oracle/record_trajectories.py      (PyTorch 2.15; see docs/dev/dependencies.md)

Weights and data are made by formulas (ops_oracle.Input), so that only losses and checksums of parameters and buffers are kept:
20 steps of AdamW (lr 1e-3, weight decay 0.01) on 20 different batches, in f32 and in f64. src/chorale/models/trajectory_test.cc does
the same and compares. Models are the benchmark's; the encoder sees 2 x 32 tokens instead of 8 x 128, for the test's time.
"""
import json
import math
import pathlib

import torch
import torch.nn.functional as F
from torch import nn

from ops_oracle import DTYPES, Input

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
STEPS = 20


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ln2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Encoder(nn.Module):
    def __init__(self, vocabulary=8192, width=256, layers=4, heads=4, length=128):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def mlp(widths):
    layers = []
    for a, b in zip(widths, widths[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 128), nn.ReLU(), nn.Linear(128, 10))


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
