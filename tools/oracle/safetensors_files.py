#!/usr/bin/env python3
"""Records small safetensors files, and checks them with the package of that name, for io/safetensors_test.cc.

    /path/to/venv/bin/python tools/oracle/safetensors_files.py > src/chorale/io/testdata/safetensors.inc

The venv needs torch, numpy and safetensors. Two files are recorded: one that the package wrote, which io::load must read;
and one in the layout that io::save promises, which the package must read and io::save must write byte by byte. Element i
of every tensor is i % 7 - 2, as far as its dtype can say so. With --check FILE... it reads files that io::save wrote and
prints their tensors.
"""
import json
import struct
import sys

import safetensors
import safetensors.torch
import torch

# The order is the header's; names test escapes and UTF-8.
TENSORS = [
    ("flags", torch.bool, [5]),
    ("h.0.attn.weight", torch.float32, [2, 3]),
    ("scalar", torch.float64, []),
    ("empty", torch.int64, [0, 4]),
    ("naïve \"名\"", torch.bfloat16, [3]),
    ("f16", torch.float16, [2, 2]),
    ("u8", torch.uint8, [3]),
    ("i8", torch.int8, [3]),
    ("i16", torch.int16, [3]),
    ("i32", torch.int32, [3]),
    ("i64", torch.int64, [2, 1, 2]),
    ("c64", torch.complex64, [2]),
]
METADATA = {"format": "pt", "note": "tab\there"}
NAMES = {torch.bool: "BOOL", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.bfloat16: "BF16",
         torch.float16: "F16", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
         torch.complex64: "C64"}


def make(dtype, shape):
    count = 1
    for size in shape:
        count *= size
    values = torch.arange(count) % 7 - 2
    if dtype == torch.uint8:
        values = values.to(torch.int8).view(torch.uint8)
    return values.to(dtype).reshape(shape)


def raw(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def ours(tensors, metadata):
    """The layout of io::save: members in the order given, data by element size, largest first."""
    place, at, data = {}, 0, b""
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        place[name] = [at, at + len(raw(tensor))]
        at += len(raw(tensor))
        data += raw(tensor)
    header = {"__metadata__": metadata}
    for name, tensor in tensors.items():
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place[name]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def check(content, tensors, metadata):
    path = "/tmp/chorale_oracle.safetensors"
    with open(path, "wb") as file:
        file.write(content)
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == tensors.keys(), loaded.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == metadata


def array(comment, name, content):
    print(f"// {comment}")
    print(f"constexpr unsigned char {name}[] = {{")
    for begin in range(0, len(content), 24):
        print("    " + ", ".join(str(byte) for byte in content[begin:begin + 24]) + ",")
    print("};")


def main():
    if sys.argv[1:2] == ["--check"]:
        for path in sys.argv[2:]:
            with safetensors.safe_open(path, "pt") as opened:
                print(path, opened.metadata())
            for name, tensor in safetensors.torch.load_file(path).items():
                print(f"  {name} {tensor.dtype} {list(tensor.shape)} {tensor.reshape(-1)[:8].tolist()}")
        return
    tensors = {name: make(dtype, shape) for name, dtype, shape in TENSORS}
    theirs = safetensors.torch.save(tensors, METADATA)
    check(theirs, tensors, METADATA)
    mine = ours(tensors, METADATA)
    check(mine, tensors, METADATA)
    print(f"// Recorded by tools/oracle/safetensors_files.py with safetensors {safetensors.__version__}.")
    array("As the package writes it.", "kWrittenByThePackage", theirs)
    array("As io::save writes it; the package reads it.", "kReadByThePackage", mine)


main()
