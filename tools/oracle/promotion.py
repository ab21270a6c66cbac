#!/usr/bin/env python3
"""Records PyTorch's type promotion as the tables that base/dtype_test.cc and base/scalar_test.cc compare with.

    /path/to/venv/bin/python tools/oracle/promotion.py > src/chorale/base/testdata/promotion.inc
"""
import torch
from promotion_names import DTYPES, NAMES


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
