"""Names of dtypes, in the order of chorale::DType."""
import torch

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
