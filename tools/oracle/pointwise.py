#!/usr/bin/env python3
"""Records what PyTorch's pointwise functions and their gradients are at awkward places, and how tensors without dimensions
promote, for op/defs/pointwise_oracle_test.cc.

    /path/to/venv/bin/python tools/oracle/pointwise.py > src/chorale/op/defs/testdata/pointwise.inc
"""
import math

import torch
import torch.nn.functional as F
from promotion_names import DTYPES, NAMES

INF, NAN = math.inf, math.nan
# Places at which something happens: zeros, ties, bounds, halves, overflow, denormals.
POINTS = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.5, -2.5, 3.0, -3.0, 1e-3, -1e-3, 1e-40, -1e-40, 9.5, -9.5, 25.0, -25.0,
          100.0, -100.0, 1e10, -1e10, 3e38, -3e38, INF, -INF, NAN]
PAIRS = [0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 3.0, -7.5, 1e30, INF, -INF, NAN]
INTEGERS = [-7, -3, -2, -1, 1, 2, 3, 7, 100]

UNARY = {
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "reciprocal": torch.reciprocal, "square": torch.square,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "floor": torch.floor, "ceil": torch.ceil, "round": torch.round,
    "trunc": torch.trunc, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log, "log2": torch.log2,
    "log10": torch.log10, "log1p": torch.log1p, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "tanh": torch.tanh,
    "erf": torch.erf, "sigmoid": torch.sigmoid, "relu": torch.relu, "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "elu": lambda x: F.elu(x, 0.7),
    "softplus": lambda x: F.softplus(x, 2, 5), "hardtanh": lambda x: F.hardtanh(x, -1, 1.5),
    "clamp": lambda x: torch.clamp(x, -1, 1.5), "clamp_min": lambda x: torch.clamp(x, min=0.5),
    "clamp_max": lambda x: torch.clamp(x, max=0.5), "isnan": torch.isnan, "isinf": torch.isinf, "isfinite": torch.isfinite,
    "logical_not": torch.logical_not, "angle": torch.angle, "add_scalar": lambda x: x + 0.1, "rsub": lambda x: 0.1 - x,
    "mul_scalar": lambda x: x * 0.1, "div_scalar": lambda x: x / 3, "rdiv": lambda x: 3 / x, "floor_divide_scalar": lambda x: x // 3,
    "remainder_scalar": lambda x: x % -3, "pow_0": lambda x: x**0, "pow_half": lambda x: x**0.5, "pow_2": lambda x: x**2,
    "pow_3": lambda x: x**3, "pow_minus_1": lambda x: x**-1.0, "pow_minus_2_5": lambda x: x**-2.5, "rpow_2": lambda x: 2.0**x,
    "rpow_0": lambda x: 0.0**x, "eq_scalar": lambda x: x == 0.5, "lt_scalar": lambda x: x < 0.5,
}
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "floor_divide": torch.floor_divide,
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"), "remainder": torch.remainder, "pow": torch.pow,
    "minimum": torch.minimum, "maximum": torch.maximum, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le,
    "gt": torch.gt, "ge": torch.ge, "logical_and": torch.logical_and, "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor, "lerp": lambda x, y: torch.lerp(x, y, 0.25), "add_scaled": lambda x, y: torch.add(x, y, alpha=3),
    "where": lambda x, y: torch.where(x > 0, x, y),
}
INTEGER_BINARY = ["add", "mul", "floor_divide", "div_trunc", "remainder", "pow", "minimum", "lt", "sub"]
# Ops that are not differentiable, there or here.
NO_GRADIENT = {"floor_divide", "floor_divide_scalar", "div_trunc"}


def number(v):
    """Short, and exact when read back."""
    short = f"{v:.6g}"
    if float(short) == v or not math.isfinite(v):
        return short
    mantissa, exponent = float(v).hex().split("p")
    return f"{mantissa.rstrip('0')}p{int(exponent)}"


def text(values):
    return " ".join(number(v) for v in values.double().flatten().tolist())


def record(name, dtype, function, inputs):
    """One line: the values, then one line for each gradient of their sum."""
    inputs = [x.clone().requires_grad_(dtype.is_floating_point) for x in inputs]
    y = function(*inputs)
    lines = [text(y.detach())]
    if y.is_floating_point() and y.requires_grad and name not in NO_GRADIENT:
        lines += [text(g) for g in torch.autograd.grad(y.sum(), inputs)]
    print(f'    {{"{name}", DType::k{NAMES[dtype].upper()}, {{' + ", ".join(f'"{line}"' for line in lines) + "}},")


print(f"// Recorded from PyTorch {torch.__version__.split('+')[0]} by tools/oracle/pointwise.py.")
print("// clang-format off")
print(f'constexpr const char* kPoints = "{text(torch.tensor(POINTS, dtype=torch.float64))}";')
print(f'constexpr const char* kPairs = "{text(torch.tensor(PAIRS, dtype=torch.float64))}";')
print(f'constexpr const char* kIntegers = "{text(torch.tensor(INTEGERS, dtype=torch.float64))}";')

print("const Recorded kUnary[] = {")
for name, function in UNARY.items():
    for dtype in (torch.float32, torch.float64):
        record(name, dtype, function, [torch.tensor(POINTS, dtype=torch.float64).to(dtype)])
print("};")
print("const Recorded kBinary[] = {")
for name, function in BINARY.items():
    points = torch.tensor(PAIRS)
    record(name, points.dtype, function, [points[:, None].expand(-1, len(PAIRS)), points.expand(len(PAIRS), -1)])
for name in INTEGER_BINARY:
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        points = torch.tensor(INTEGERS).to(dtype)
        record(name, dtype, BINARY[name], [points[:, None].expand(-1, len(INTEGERS)), points.expand(len(INTEGERS), -1)])
print("};")

print("// A tensor with dimensions (row) and one without (column), then those two and a bool, integer, floating and complex number.")
print("constexpr const char* kDimsAndNone[] = {")
for a in DTYPES.values():
    x = torch.ones(2, dtype=a)
    print('    "' + " ".join(NAMES[torch.result_type(x, torch.ones((), dtype=b))] for b in DTYPES.values()) + '",')
print("};")
print("constexpr const char* kNoneAndNumber[] = {")
for a in DTYPES.values():
    x = torch.ones((), dtype=a)
    print('    "' + " ".join(NAMES[torch.result_type(x, number)] for number in (True, 1, 1.5, 1j)) + '",')
print("};")
print("// clang-format on")
