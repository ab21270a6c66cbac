"""PyTorch's ops, one thread, as the peer of `chorale bench ops`.

Reads one case per line from standard input, as JSON (chorale/app/bench/ops.cc writes them), measures it for about the time it is
told, and answers with nanoseconds per call, or with a line that begins with "!" and says why not. Cases are kept, so that ours and
theirs can be measured in turns.
"""
import json
import os
import sys
import time

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # AMX code dies on virtual machines that hide the tiles
import torch
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64}
torch.set_num_threads(1)


OPS = {
    "add": torch.add, "mul": torch.mul, "div": torch.div, "where": lambda x, y: torch.where(x > 0, x, y),
    "mul_scalar": lambda x: torch.mul(x, 2.5), "add_": lambda x, y: x.add_(y),
    "exp": torch.exp, "log": torch.log, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu, "gelu": F.gelu, "silu": F.silu,
    "erf": torch.erf, "sin": torch.sin, "sqrt": torch.sqrt, "pow2": lambda x: torch.pow(x, 2.0), "clone": torch.clone, "to_bf16": lambda x: x.to(torch.bfloat16),
    "to_f32": lambda x: x.to(torch.float32), "transpose_copy": lambda x: x.t().contiguous(),
    "sum": torch.sum, "sum0": lambda x: torch.sum(x, 0), "sum1": lambda x: torch.sum(x, 1), "mean": torch.mean, "amax1": lambda x: torch.amax(x, 1),
    "argmax1": lambda x: torch.argmax(x, 1), "cumsum1": lambda x: torch.cumsum(x, 1), "logsumexp1": lambda x: torch.logsumexp(x, 1), "var1": lambda x: torch.var(x, 1),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "matmul": torch.matmul, "linear": F.linear, "conv2d": lambda x, w: F.conv2d(x, w, padding=1), "einsum": lambda a, b: torch.einsum("bij,bjk->bik", a, b),
    "view": lambda x: x.view(-1), "slice": lambda x: x[1:], "cat": lambda x, y: torch.cat([x, y], 0), "pad": lambda x: F.pad(x, (1, 1)),
    "index_select": lambda x, i: torch.index_select(x, 0, i), "embedding": lambda i, w: F.embedding(i, w), "gather": lambda x, i: torch.gather(x, 1, i), "masked_fill": lambda x, y: x.masked_fill(y > 0, 0.0),
    "softmax": lambda x: torch.softmax(x, -1), "log_softmax": lambda x: torch.log_softmax(x, -1), "layer_norm": lambda x, w, b: F.layer_norm(x, w.shape, w, b),
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, True), "max_pool2d": lambda x: F.max_pool2d(x, 2), "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "cross_entropy": lambda x, t: F.cross_entropy(x, t), "attention": lambda q, k, v: F.scaled_dot_product_attention(q, k, v), "dropout": lambda x: F.dropout(x, 0.5),
    "sort": lambda x: torch.sort(x, -1)[0], "topk": lambda x: torch.topk(x, 10, -1)[0], "uniform": lambda x: torch.rand(x.shape), "normal": lambda x: torch.randn(x.shape),
    "zeros": lambda x: torch.zeros(x.shape),
}


def make(spec):
    if spec["dtype"] == "i64":
        return torch.randint(0, spec["below"], spec["sizes"])
    return (torch.rand(spec["sizes"]) * 1.5 + 0.25).to(DTYPES[spec["dtype"]])


def prepare(case):
    inputs = [make(s) for s in case["in"]]
    op = OPS[case["op"]]
    if not case["grad"]:
        return lambda: op(*inputs)
    leaves = [x.requires_grad_(True) for x in inputs if x.is_floating_point()]
    seed = torch.ones_like(op(*inputs))

    def step():
        for x in leaves:
            x.grad = None
        op(*inputs).backward(seed)
    return step


def seconds(run, count):
    start = time.perf_counter()
    for _ in range(count):
        run()
    return time.perf_counter() - start


def main():
    prepared = {}
    print("torch " + torch.__version__, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        case = request["case"]
        try:
            if case["case"] not in prepared:
                run = prepare(case)
                run()
                count = 1
                while (took := seconds(run, count)) < request["seconds"] / 4 and count < 1 << 22:
                    count *= 2
                prepared[case["case"]] = run, max(1, round(count * request["seconds"] / max(took, 1e-9)))
            run, count = prepared[case["case"]]
            print(seconds(run, count) / count * 1e9, flush=True)
            if request.get("last"):
                del prepared[case["case"]]
        except Exception as error:  # the table says why
            print("! " + str(error).replace("\n", " ")[:200], flush=True)


if __name__ == "__main__":
    main()
