"""PyTorch training steps on one GPU, eager and compiled, as the peer to stand beside.

  python3 torch_gpu.py [--json FILE] [--only TEXT] [--steps N]

gpt2_124m (B 32, T 1024, vocabulary padded to 50,304, tied head), bert_base (B 32, T 512), resnet50 (B 256, channels-last): bf16
autocast over f32 weights, AdamW fused; tinymlp and mlp512x4 as in README.md, f32, with device graphs when compiled. One row per
model and mode: milliseconds per step (median), tokens or images per second, peak GiB, seconds until the first compiled step is done.
"""
import argparse, json, statistics, time
import torch, torch.nn as nn, torch.nn.functional as F
from torch_models import mlp


class Block(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.ln1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ln2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, vocabulary, length, causal, width=768, layers=12, heads=12):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def resnet50():
    from torchvision.models import resnet50
    return resnet50().to(memory_format=torch.channels_last)


def workloads():
    def ids(vocabulary, length):
        x = torch.randint(0, vocabulary, (32, length), device="cuda")
        return x, x.flatten()
    def labelled(x, classes):
        return x, torch.randint(0, classes, (x.shape[0],), device="cuda")
    images = torch.randn(256, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    return {
        "gpt2_124m": (lambda: Transformer(50304, 1024, True), ids(50304, 1024), 32 * 1024, True),
        "bert_base": (lambda: Transformer(30522, 512, False), ids(30522, 512), 32 * 512, True),
        "resnet50": (resnet50, labelled(images, 1000), 256, True),
        "mlp512x4": (lambda: mlp([512] * 5 + [10]), labelled(torch.randn(32, 512, device="cuda"), 10), 32, False),
        "tinymlp": (lambda: mlp([20, 32, 10]), labelled(torch.randn(8, 20, device="cuda"), 10), 8, False),
    }


def measure(name, compiled, steps):
    make, (x, target), items, lower = workloads()[name]
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    model = make().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model, mode=None if lower else "reduce-overhead") if compiled else model

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=lower):
            loss = F.cross_entropy(forward(x).flatten(0, -2), target)
        loss.backward()
        optimizer.step()

    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(5):
        step()
    times = []
    for _ in range(steps):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        step()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    ms = statistics.median(times)
    return dict(case=f"{name}/{'compiled' if compiled else 'eager'}", ms=ms, items_per_s=items / ms * 1e3, first_s=first,
                peak_gib=torch.cuda.max_memory_allocated() / 2**30)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    rows = []
    for name in workloads():
        for compiled in (False, True):
            if args.only in name:
                rows.append(measure(name, compiled, args.steps))
                print("{case:22} {ms:9.3f} ms  {items_per_s:>12,.0f} /s  first {first_s:6.1f} s  peak {peak_gib:5.1f} GiB".format(**rows[-1]), flush=True)
    if args.json:
        with open(args.json, "w") as out:
            json.dump(rows, out)
