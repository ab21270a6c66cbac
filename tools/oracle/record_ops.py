"""The cases; see ops_oracle.py. Families are functions named family_*."""
import argparse
import pathlib

import torch
import torch.nn.functional as F

from ops_oracle import Family, Input

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
AWKWARD = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, -1e-40, 1e-38, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0,
           10.0, -10.0, 88.8, -104.0, 1e4, -1e4, 3e38, -3e38]
MILD = [0.25, -0.75, 1.5, -2.0, 3.0, 0.1, -0.1, 0.9]
FLOATS = ["f32", "f64", "bf16", "f16"]


def family_unary(f):
    smooth = {
        "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "reciprocal": torch.reciprocal, "square": torch.square, "sqrt": torch.sqrt,
        "rsqrt": torch.rsqrt, "floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc, "exp": torch.exp,
        "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log, "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p,
        "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "tanh": torch.tanh, "erf": torch.erf, "sigmoid": torch.sigmoid,
        "relu": torch.relu, "silu": F.silu, "gelu": F.gelu, "isnan": torch.isnan, "isinf": torch.isinf, "isfinite": torch.isfinite,
        "logical_not": torch.logical_not,
    }
    for name, call in smooth.items():
        for dtype in ["f32", "f64"]:
            # The awkward values test values; gradients there are infinite or undefined as often as not, and only compared on mild ones.
            # PyTorch's vectorised gelu overflows for huge arguments; ours does not.
            wild = [v for v in AWKWARD if name != "gelu" or not v > 1e5]
            f.add(name, [Input([len(wild)], dtype, values=wild)], call, grad=False)
            f.add(name, [Input([len(MILD)], dtype, values=MILD)], call)
        for dtype in ["bf16", "f16"]:
            f.add(name, [Input([len(MILD)], dtype, values=MILD)], call)
        f.add(name, [Input([2, 3], "f64", 3, 0.1, 2)], lambda x, c=call: c(x.t()), args={"transpose": True})
        f.add(name, [Input([0, 3])], call)
        f.add(name, [Input([], values=0.75)], call)
    for name in ["neg", "abs", "sign", "square", "sqrt", "exp", "sin", "sigmoid", "reciprocal"]:
        for dtype in ["u8", "i8", "i16", "i32", "i64"]:
            low = 0 if dtype == "u8" else -5
            f.add(name, [Input([6], dtype, 1, low, 9)], smooth[name])
    for name in ["exp", "log", "sin", "cos", "tan", "tanh", "sqrt", "rsqrt", "square", "reciprocal", "neg", "sigmoid"]:
        for dtype in ["c64", "c128"]:
            f.add(name, [Input([5], dtype, 4)], smooth[name])
    for dtype in ["c64", "c128"]:
        for name in ["real", "imag", "conj", "angle", "abs"]:
            call = {"real": torch.real, "imag": torch.imag, "conj": lambda x: torch.conj(x).resolve_conj(), "angle": torch.angle, "abs": torch.abs}[name]
            f.add(name, [Input([5], dtype, 5)], call)
    f.add("angle", [Input([3], values=[1.0, -1.0, 0.0])], torch.angle, grad=False)
    for dtype in ["f32", "f64", "bf16"]:
        x = [Input([len(MILD)], dtype, values=MILD)]
        f.add("gelu", x, lambda x: F.gelu(x, approximate="tanh"), {"approximate": "tanh"})
        f.add("leaky_relu", x, lambda x: F.leaky_relu(x, 0.2), {"slope": 0.2})
        f.add("elu", x, lambda x: F.elu(x, 1.5), {"alpha": 1.5})
        f.add("softplus", x, lambda x: F.softplus(x, 2.0, 3.0), {"beta": 2.0, "threshold": 3.0})
        f.add("hardtanh", x, lambda x: F.hardtanh(x, -0.5, 1.25), {"min": -0.5, "max": 1.25})
        f.add("clamp", x, lambda x: torch.clamp(x, -0.5, 1.5), {"min": -0.5, "max": 1.5})
        f.add("clamp", x, lambda x: torch.clamp(x, min=0.9), {"min": 0.9})
    wild = [Input([len(AWKWARD)], "f32", values=AWKWARD)]
    f.add("gelu", wild, lambda x: F.gelu(x, approximate="tanh"), {"approximate": "tanh"}, grad=False)
    f.add("elu", wild, lambda x: F.elu(x), {"alpha": 1.0}, grad=False)
    f.add("softplus", wild, lambda x: F.softplus(x), {"beta": 1.0, "threshold": 20.0}, grad=False)
    f.add("clamp", wild, lambda x: torch.clamp(x, -1.0, 1.0), {"min": -1.0, "max": 1.0}, grad=False)
    for to in ["bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64", "c64"]:
        for come in ["bool", "u8", "i8", "i32", "i64", "f16", "bf16", "f32", "f64"]:
            from ops_oracle import DTYPES
            low = 0 if come in ("bool", "u8") or to == "u8" else -100
            f.add("to", [Input([7], come, 2, low, 100)], lambda x, t=DTYPES[to]: x.to(t), {"dtype": to}, grad=False)


def family_binary(f):
    calls = {
        "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": torch.pow, "remainder": torch.remainder,
        "floor_divide": torch.floor_divide, "minimum": torch.minimum, "maximum": torch.maximum, "eq": torch.eq, "ne": torch.ne,
        "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "logical_and": torch.logical_and, "logical_or": torch.logical_or,
        "logical_xor": torch.logical_xor,
    }
    short = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -2.5, 1e-40, 3e38]
    left = [a for a in short for _ in short]
    right = [b for _ in short for b in short]
    for name, call in calls.items():
        differentiable = name != "floor_divide"
        for dtype in ["f32", "f64"]:
            # 1 % 1e-40 overflows on PyTorch's way to it and gives NaN; ours is exact.
            pairs = [(a, b) for a, b in zip(left, right) if name != "remainder" or abs(b) != 1e-40]
            f.add(name, [Input([len(pairs)], dtype, values=[p[k] for p in pairs]) for k in (0, 1)], call, grad=False)
        positive = name in ("pow", "remainder", "floor_divide")
        for dtype in FLOATS:
            f.add(name, [Input([3, 4], dtype, 1, 0.3 if positive else -2, 2), Input([4], dtype, 2, 0.6, 2)], call, grad=differentiable)
        f.add(name, [Input([2, 1, 3], "f64", 3, 0.2, 2), Input([4, 1], "f64", 4, 0.5, 2)], call, grad=differentiable)
        f.add(name, [Input([0, 3]), Input([3], "f32", 1)], call, grad=differentiable)
        f.add(name, [Input([], "f64", 5, 0.5, 1), Input([3], "f32", 6, 0.5, 2)], call, grad=differentiable)
        f.add(name, [Input([3], "i32", 7, 1, 9), Input([3], "f16", 8, 0.5, 2)], call, grad=differentiable)
        for dtype in ["u8", "i8", "i16", "i32", "i64"]:
            if name == "pow" and dtype != "i64":
                continue
            low = 0 if dtype == "u8" or name == "pow" else -9
            f.add(name, [Input([9], dtype, 1, low, 9), Input([9], dtype, 2, 1, 6)], call, grad=differentiable)
        f.add(name, [Input([5], "u8", 1, 0, 9), Input([5], "i8", 2, 1, 6)], call, grad=differentiable)
        if name in ("add", "mul", "eq", "ne", "logical_and", "logical_or", "logical_xor"):
            f.add(name, [Input([6], "bool", 1), Input([6], "bool", 2)], call)
        if name in ("add", "sub", "mul", "div", "pow", "eq", "ne"):
            f.add(name, [Input([5], "c64", 1), Input([5], "c64", 2)], call)
            f.add(name, [Input([5], "c128", 1), Input([5], "f64", 2, 0.5, 2)], call)
    ties = [Input([4], "f64", values=[1.0, 2.0, 3.0, 3.0]), Input([4], "f64", values=[1.0, 3.0, 2.0, 3.0])]
    for name in ("minimum", "maximum"):
        f.add(name, ties, calls[name])
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        for dtype in ["bool", "u8", "i32", "i64"]:
            f.add(name, [Input([8], dtype, 1, 0, 100), Input([8], dtype, 2, 0, 100)], getattr(torch, name))
    f.add("bitwise_not", [Input([5], "i16", 1, -9, 9)], torch.bitwise_not)
    for scalar in [2, -3, 2.5, 0.5, 0, 1]:
        for dtype in ["f32", "bf16", "i32", "i64", "u8"]:
            low = 1 if dtype == "u8" else -5
            x = [Input([5], dtype, 3, low, 6)]
            for name in ("add", "sub", "mul"):
                if dtype == "u8" and scalar == -3:
                    continue
                f.add(name, x, lambda a, c=calls[name], s=scalar: c(a, s), {"scalar": scalar})
            if scalar:
                f.add("div", x, lambda a, s=scalar: torch.div(a, s), {"scalar": scalar})
                if dtype != "u8":
                    f.add("remainder", x, lambda a, s=scalar: torch.remainder(a, s), {"scalar": scalar})
            if dtype in ("f32", "bf16") or (isinstance(scalar, int) and scalar >= 0):
                f.add("pow", [Input([5], dtype, 3, 1, 4)], lambda a, s=scalar: torch.pow(a, s), {"scalar": scalar})
    x, y, z = Input([2, 3], "f64", 1), Input([3], "f64", 2), Input([2, 1], "f64", 3, 0.5, 2)
    f.add("where", [Input([2, 3], "bool", 9), x, y], torch.where)
    f.add("lerp", [x, Input([2, 3], "f64", 4), z], torch.lerp)
    f.add("addcmul", [x, y, z], lambda a, b, c: torch.addcmul(a, b, c, value=0.5), {"value": 0.5})
    f.add("addcdiv", [x, y, z], lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), {"value": 0.5})
    f.add("masked_fill", [x, Input([2, 3], "bool", 9)], lambda a, m: a.masked_fill(m, 7.0), {"value": 7.0})


def family_reduce(f):
    shapes = {"[]": [], "[0]": [0], "[0, 2]": [0, 2], "[1]": [1], "[2]": [2], "[-1]": [-1]}
    def reduce_cases(name, call, dtypes, needs_elements=False, **extra):
        for dtype in dtypes:
            for dims in shapes.values():
                for keepdim in (False, True):
                    f.add(name, [Input([3, 4, 5], dtype, 1, 0.5 if name in ("prod",) else -2, 2)],
                          lambda x, d=tuple(dims), k=keepdim: call(x, d if d else tuple(range(x.dim())), k), {"dims": dims, "keepdim": keepdim} | extra)
            f.add(name, [Input([2, 3], dtype, values=[float("nan"), 1, 2, 3, float("inf"), -1])], lambda x: call(x, (1,), False), {"dims": [1], "keepdim": False} | extra, grad=False)
            if not needs_elements:
                f.add(name, [Input([0, 3], dtype)], lambda x: call(x, (0,), False), {"dims": [0], "keepdim": False} | extra)
    reduce_cases("sum", lambda x, d, k: torch.sum(x, d, k), ["f32", "f64", "bf16"])
    reduce_cases("mean", lambda x, d, k: torch.mean(x, d, k), ["f32", "f64", "f16"])
    reduce_cases("amax", lambda x, d, k: torch.amax(x, d, k), ["f32", "f64"], True)
    reduce_cases("amin", lambda x, d, k: torch.amin(x, d, k), ["f32", "f64"], True)
    reduce_cases("logsumexp", lambda x, d, k: torch.logsumexp(x, d, k), ["f32", "f64"])
    reduce_cases("var", lambda x, d, k: torch.var(x, d, correction=1, keepdim=k), ["f32", "f64"], correction=1)
    reduce_cases("stddev", lambda x, d, k: torch.std(x, d, correction=0, keepdim=k), ["f64"], correction=0)
    for p in (1.0, 2.0, 3.0, 0.0, float("inf"), float("-inf")):
        arg = {float("inf"): "inf", float("-inf"): "-inf"}.get(p, p)
        for dims in ([], [1], [0, 2]):
            f.add("norm", [Input([3, 4, 2], "f64", 2)], lambda x, d=dims, q=p: torch.linalg.vector_norm(x, q, d if d else None), {"dims": dims, "p": arg})
    f.add("norm", [Input([3], "f64", values=[0.0, 0.0, 0.0])], lambda x: torch.linalg.vector_norm(x), {"dims": [], "p": 2.0})
    for dtype in ["bool", "u8", "i8", "i32", "i64"]:
        f.add("sum", [Input([3, 4], dtype, 1, 0, 100)], lambda x: torch.sum(x, 1), {"dims": [1], "keepdim": False})
        f.add("prod", [Input([3, 4], dtype, 1, 0, 6)], lambda x: torch.prod(x, 1), {"dims": [1], "keepdim": False})
        if dtype != "u8":  # for which PyTorch alone answers in u8
            f.add("any", [Input([3, 4], dtype, 1, 0, 2)], lambda x: torch.any(x, 1), {"dims": [1], "keepdim": False})
            f.add("all", [Input([3, 4], dtype, 1, 0, 2)], lambda x: torch.all(x, 1), {"dims": [1], "keepdim": False})
    for values in ([1.5, 2.0, -3.0, 0.5], [1.5, 0.0, -3.0, 0.5], [0.0, 0.0, 2.0, 1.0]):
        f.add("prod", [Input([4], "f64", values=values)], lambda x: torch.prod(x, 0), {"dims": [0], "keepdim": False})
        f.add("cumprod", [Input([4], "f64", values=values)], lambda x: torch.cumprod(x, 0), {"dim": 0})
    for dim in (0, 1, -1):
        for dtype in ("f32", "f64", "i32", "bf16"):
            f.add("cumsum", [Input([3, 4], dtype, 1, -5, 5)], lambda x, d=dim: torch.cumsum(x, d), {"dim": dim})
        f.add("cumprod", [Input([3, 4], "f64", 1)], lambda x, d=dim: torch.cumprod(x, d), {"dim": dim})
        for name, call in (("argmax", torch.argmax), ("argmin", torch.argmin)):
            f.add(name, [Input([3, 4], "f32", 1)], lambda x, d=dim, c=call: c(x, d), {"dim": dim})
        for name, call in (("max", torch.max), ("min", torch.min)):
            f.add(name, [Input([3, 4], "f64", 1)], lambda x, d=dim, c=call: tuple(c(x, d)), {"dim": dim})
            f.add(name, [Input([2, 3], "f32", values=[1, float("nan"), 3, 2, 2, 1])], lambda x, d=dim, c=call: tuple(c(x, d)), {"dim": dim}, grad=False)
    f.add("amax", [Input([2, 3], "f64", values=[1, 3, 3, 2, 2, 2])], lambda x: torch.amax(x, 1), {"dims": [1], "keepdim": False})
    # Large: error must not grow with length.
    for dtype in ("f32", "bf16", "f64"):
        f.add("sum", [Input([300, 701], dtype, 4, 0, 1, grad=False)], lambda x: torch.sum(x, 1), {"dims": [1], "keepdim": False}, tolerance=None)
        f.add("mean", [Input([300, 701], dtype, 4, 0, 1, grad=False)], lambda x: torch.mean(x, 0), {"dims": [0], "keepdim": False})


def family_product(f):
    for dtype in ["f32", "f64", "bf16", "f16", "c64", "c128"]:
        for a, b in [([3, 4], [4, 5]), ([4], [4]), ([3, 4], [4]), ([4], [4, 2]), ([2, 3, 4], [2, 4, 5]), ([2, 1, 3, 4], [5, 4, 2]), ([2, 3, 4], [4, 5]),
                     ([0, 4], [4, 2]), ([3, 0], [0, 2])]:
            f.add("matmul", [Input(a, dtype, 1), Input(b, dtype, 2)], torch.matmul)
        if dtype[0] != "c":
            f.add("linear", [Input([2, 3, 4], dtype, 1), Input([5, 4], dtype, 2), Input([5], dtype, 3)], F.linear)
            f.add("addmm", [Input([5], dtype, 1), Input([3, 4], dtype, 2), Input([4, 5], dtype, 3)], lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), {"beta": 0.5, "alpha": 2})
    f.add("matmul", [Input([130, 257], "f32", 1, grad=False), Input([257, 190], "f32", 2, grad=False)], torch.matmul)
    f.add("matmul", [Input([3, 4], "i64", 1, -9, 9), Input([4, 2], "i64", 2, -9, 9)], torch.matmul)
    for equation, shapes in {"ij,jk->ik": ([3, 4], [4, 5]), "bij,bjk->bik": ([2, 3, 4], [2, 4, 5]), "ij->ji": ([3, 4],), "ii->i": ([3, 3],), "ij,kj->ik": ([3, 4], [2, 4]),
                             "...ij,...jk->...ik": ([2, 3, 4], [4, 5]), "i,j,k->ijk": ([2], [3], [4]), "bhqd,bhkd->bhqk": ([2, 2, 3, 4], [2, 2, 5, 4])}.items():
        f.add("einsum", [Input(s, "f64", k + 1) for k, s in enumerate(shapes)], lambda *x, e=equation: torch.einsum(e, *x), {"equation": equation})
    for dtype in ["f32", "f64", "bf16"]:
        for d, call, transposed in [(1, F.conv1d, F.conv_transpose1d), (2, F.conv2d, F.conv_transpose2d), (3, F.conv3d, F.conv_transpose3d)]:
            size = [7, 6, 5][:d]
            for stride, padding, dilation, groups in [(1, 0, 1, 1), (2, 1, 1, 1), (1, 2, 2, 2), (1, 1, 1, 4)]:
                args = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
                f.add(f"conv{d}d", [Input([2, 4] + size, dtype, 1), Input([4, 4 // groups] + [3, 2, 3][:d], dtype, 2), Input([4], dtype, 3)],
                      lambda x, w, b, c=call, a=(stride, padding, dilation, groups): c(x, w, b, *a), args)
                if stride >= 1 and padding < 2:
                    f.add(f"conv_transpose{d}d", [Input([2, 4] + [4, 3, 3][:d], dtype, 1), Input([4, 6 // (2 if groups > 1 else 1)] + [3, 2, 3][:d], dtype, 2), None],
                          lambda x, w, b, c=transposed, s=stride, p=padding, g=2 if groups > 1 else 1: c(x, w, b, s, p, s - 1, g, 1),
                          {"stride": stride, "padding": padding, "output_padding": stride - 1, "groups": 2 if groups > 1 else 1})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    import record_ops_more
    for module in (globals(), vars(record_ops_more)):
        for name, record in list(module.items()):
            if name.startswith("family_") and args.only in name:
                family = Family(name.removeprefix("family_"))
                record(family)
                family.save(ROOT / "tests" / "oracle")


if __name__ == "__main__":
    main()
