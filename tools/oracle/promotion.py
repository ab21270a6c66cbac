#!/usr/bin/env python3
"""Records PyTorch's type promotion as the tables that base/dtype_test.cc and base/scalar_test.cc compare with.

    /path/to/venv/bin/python tools/oracle/promotion.py > src/chorale/base/testdata/promotion.inc
"""
import torch

# In the order of chorale::DType.
DTYPES = {
    "bool": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64, "c64": torch.complex64,
    "c128": torch.complex128,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Chorale has no complex types with 16-bit parts; the next wider one stands in for them.
for half in ("complex32", "bcomplex32"):
    if hasattr(torch, half):
        NAMES[getattr(torch, half)] = "c64"


def table(comment, name, rows):
    print(f"// {comment}")
    print(f"constexpr const char* {name}[kDTypeCount] = {{")
    for dtypes in rows:
        print('    "' + " ".join(f"{NAMES[dtype]:4}" for dtype in dtypes).rstrip() + '",')
    print("};")


print(f"// Recorded from PyTorch {torch.__version__.split('+')[0]} by tools/oracle/promotion.py; one row per DType, in order.")
table("With a tensor of each DType.", "kTorchPromotion",
      [[torch.promote_types(a, b) for b in DTYPES.values()] for a in DTYPES.values()])
table("With a bool, an integer, a floating and a complex number.", "kTorchScalarPromotion",
      [[torch.result_type(torch.ones(2, dtype=a), number) for number in (True, 1, 1.5, 1j)] for a in DTYPES.values()])
