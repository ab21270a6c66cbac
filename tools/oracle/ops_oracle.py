"""Records what PyTorch computes, as the independent judge of our ops.

  python3 tools/oracle/record_ops.py [--only FAMILY]      (PyTorch 2.15; see docs/dev/dependencies.md)

Every case is a call by name with inputs that a formula makes (ops_oracle.Input), PyTorch's results, and its gradients for output
gradients that a formula makes too. Results of more than kFew elements are stored as every n-th value and the sum of all. The
files go to tests/oracle/FAMILY.json; src/chorale/api/oracle_test.cc compares without PyTorch being there.
"""
import json
import math
import pathlib

import numpy
import torch

DTYPES = {
    "bool": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
    "c64": torch.complex64, "c128": torch.complex128,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
kFew = 48  # results up to this size are stored whole


def mix(x):
    """splitmix64, as op/samples.cc has it."""
    with numpy.errstate(over="ignore"):
        x = x + numpy.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        return x ^ (x >> numpy.uint64(31))


def bits(seed, count):
    with numpy.errstate(over="ignore"):
        return mix(mix(numpy.array([seed], numpy.uint64)) + numpy.arange(count, dtype=numpy.uint64))


class Input:
    """A tensor by formula: uniform numbers in [low, high), integers likewise, or listed values."""

    def __init__(self, shape, dtype="f32", seed=0, low=-2.0, high=2.0, values=None, grad=True):
        self.shape, self.dtype, self.seed, self.low, self.high, self.values = list(shape), dtype, seed, low, high, values
        self.grad = grad and dtype[0] in "fbc" and dtype != "bool"

    def tensor(self):
        count = math.prod(self.shape)
        dtype = DTYPES[self.dtype]
        if self.values is not None:
            wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else dtype
            return torch.tensor(self.values, dtype=wide).reshape(self.shape).to(dtype)
        raw = bits(self.seed, 2 * count if dtype.is_complex else count)
        if dtype == torch.bool:
            return torch.tensor((raw >> numpy.uint64(63)).astype(bool)).reshape(self.shape)
        if not dtype.is_floating_point and not dtype.is_complex:
            span = numpy.uint64(int(self.high) - int(self.low))
            return torch.tensor((raw % span).astype(numpy.int64) + int(self.low)).to(dtype).reshape(self.shape)
        unit = (raw >> numpy.uint64(11)).astype(numpy.float64) * 2.0**-53
        real = self.low + (self.high - self.low) * unit
        if dtype.is_complex:
            real = real[0::2] + 1j * real[1::2]
        return torch.tensor(real).reshape(self.shape).to(dtype)

    def json(self):
        if self.values is not None:
            return {"d": self.dtype, "s": self.shape, "v": numbers(self.tensor())}
        return {"d": self.dtype, "s": self.shape, "seed": self.seed, "low": self.low, "high": self.high}


def number(x):
    if isinstance(x, complex):
        return [number(x.real), number(x.imag)]
    if isinstance(x, float):
        return "nan" if math.isnan(x) else "inf" if x == math.inf else "-inf" if x == -math.inf else float(f"{x:.17g}")
    return x


def numbers(tensor):
    flat = tensor.detach().reshape(-1)
    if flat.dtype.is_floating_point:
        single = flat.dtype != torch.float64
        return [number(float(f"{v:.9g}") if single and math.isfinite(v) else v) for v in flat.to(torch.float64).tolist()]
    if flat.dtype.is_complex:
        return [number(v) for v in flat.to(torch.complex128).tolist()]
    return [int(v) for v in flat.to(torch.int64).tolist()]


def result(tensor):
    entry = {"d": NAMES[tensor.dtype], "s": list(tensor.shape)}
    count = tensor.numel()
    if count <= kFew:
        return entry | {"v": numbers(tensor)}
    step = max(1, count // kFew)
    flat = tensor.detach().reshape(-1)
    wide = flat.to(torch.complex128 if flat.dtype.is_complex else torch.float64)
    entry |= {"step": step, "v": numbers(flat[::step])}
    total = complex(wide.sum()) if flat.dtype.is_complex else float(wide.sum())
    return entry if step == 1 else entry | {"sum": number(total)}


class Family:
    def __init__(self, name):
        self.name, self.cases = name, []

    def add(self, function, inputs, call, args=None, grad=True, tolerance=None):
        """`call(*tensors)` is PyTorch's; `function` and `args` tell our test what to call."""
        tensors = [None if i is None else i.tensor() for i in inputs]
        wanted = []
        if grad:
            for i, t in zip(inputs, tensors):
                if i is not None and i.grad and t.is_leaf:
                    t.requires_grad_(True)
                    wanted.append(t)
        case = {"f": function, "in": [None if i is None else i.json() for i in inputs]}
        for entry, t in zip(case["in"], tensors):
            if t is not None and t.requires_grad:
                entry["g"] = 1
        if args:
            case["a"] = args
        if tolerance:
            case["tol"] = tolerance
        out = call(*tensors)
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        case["out"] = [result(o) for o in outs]
        roots = [o for o in outs if o.requires_grad]
        if grad and wanted and roots:
            weights = []
            for k, o in enumerate(outs):
                if o.requires_grad:
                    bounds = (-2, 2) if o.dtype.is_complex else (0.5, 1.5)
                    weights.append(Input(o.shape, NAMES[o.dtype], 1000 + k, *bounds).tensor())
            grads = torch.autograd.grad(roots, wanted, weights, allow_unused=True)
            case["grad"] = [None if g is None else result(g.to_dense() if g.is_sparse else g) for g in grads]
        self.cases.append(case)

    def save(self, folder):
        path = pathlib.Path(folder) / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in self.cases)
        path.write_text(f'{{"torch":"{torch.__version__}","cases":[\n{lines}\n]}}\n')
        print(f"{self.name}: {len(self.cases)} cases, {path.stat().st_size / 1024:.0f} KiB")
