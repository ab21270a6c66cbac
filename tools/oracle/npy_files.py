#!/usr/bin/env python3
"""Records small .npy files as NumPy writes them, for io/npy_test.cc.

    /path/to/venv/bin/python tools/oracle/npy_files.py > src/chorale/io/testdata/npy.inc

The venv needs numpy. Each array has shape (2, 3) and element i is i % 7 - 2, as far as its dtype can say so. Those of version
1 in C order and little-endian are also what io::save_npy must write, byte by byte.
"""
import io

import numpy

CASES = [(name, 1, False) for name in
         ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128",
          ">i2", ">f4", ">c16")]
CASES += [("float32", 2, False), ("float32", 3, False), ("float32", 1, True), (">i4", 1, True)]


def literal(content):
    """A C++ string literal; octal escapes, since they end after three digits."""
    text = "".join(chr(b) if 0x20 <= b < 0x7f and chr(b) not in '"\\?' else f"\\{b:03o}" for b in content)
    return f'std::string_view("{text}", {len(content)})'


print(f"// Recorded by tools/oracle/npy_files.py with NumPy {numpy.__version__}.")
print("constexpr NpyCase kNpyCases[] = {")
for dtype, version, fortran in CASES:
    array = (numpy.arange(6) % 7 - 2).astype(dtype).reshape(2, 3)
    if fortran:
        array = numpy.asfortranarray(array)
    file = io.BytesIO()
    numpy.lib.format.write_array(file, array, version=(version, 0))
    print(f'    {{"{dtype}", {version}, {str(fortran).lower()},')
    print(f"     {literal(file.getvalue())}}},")
print("};")
