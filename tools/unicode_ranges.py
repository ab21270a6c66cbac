#!/usr/bin/env python3
"""Writes the ranges of Unicode letters and numbers (general categories L and N) that text/unicode.cc searches.

    python3 tools/unicode_ranges.py > src/chorale/text/unicode_ranges.inc
"""
import sys
import unicodedata


def ranges(category):
    result = []
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code))[0] == category:
            if result and result[-1][1] == code - 1:
                result[-1][1] = code
            else:
                result.append([code, code])
    return result


print(f"// Unicode {unicodedata.unidata_version}, written by tools/unicode_ranges.py: first and last code point of each range.")
for name, category in (("kLetters", "L"), ("kNumbers", "N")):
    print(f"constexpr Range {name}[] = {{")
    line = "   "
    for first, last in ranges(category):
        item = f" {{{first:#x}, {last:#x}}},"
        if len(line) + len(item) > 118:
            print(line)
            line = "   "
        line += item
    print(line)
    print("};")
