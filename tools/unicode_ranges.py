#!/usr/bin/env python3
"""Writes the tables of Unicode that text/unicode.cc searches.

    python3 tools/unicode_ranges.py ranges > src/chorale/text/unicode_ranges.inc
    python3 tools/unicode_ranges.py folds > src/chorale/text/unicode_folds.inc

Ranges of general categories; and for each character that has them, what it is without its accents (its canonical decomposition
without marks; Hangul syllables are computed instead) and what it is in lower case.
"""
import sys
import unicodedata

CODES = [code for code in range(sys.maxunicode + 1) if not 0xd800 <= code <= 0xdfff]
HANGUL = range(0xac00, 0xd7a4)


def ranges(categories):
    result = []
    for code in CODES:
        if unicodedata.category(chr(code)).startswith(categories):
            if result and result[-1][1] == code - 1:
                result[-1][1] = code
            else:
                result.append([code, code])
    return result


def print_table(head, rows):
    print(f"constexpr {head}[] = {{")
    line = "   "
    for row in rows:
        item = " {" + ", ".join(f"{number:#x}" for number in row) + "},"
        if len(line) + len(item) > 118:
            print(line)
            line = "   "
        line += item
    print(line)
    print("};")


def replacements(of):
    """Those of one to three characters; of an empty one a range says that it goes."""
    return [[code, *map(ord, text)] for code in CODES if (text := of(chr(code))) not in ("", chr(code))]


def without_accents(char):
    if ord(char) in HANGUL:
        return char
    return "".join(part for part in unicodedata.normalize("NFD", char) if unicodedata.category(part) != "Mn")


print(f"// Unicode {unicodedata.unidata_version}, written by tools/unicode_ranges.py: ", end="")
if sys.argv[1:] == ["ranges"]:
    print("first and last code point of each range.")
    print_table("Range kLetters", ranges("L"))
    print_table("Range kNumbers", ranges("N"))
    print_table("Range kPunctuation", ranges("P"))
    print_table("Range kMarks", ranges("Mn"))
    print_table("Range kInvisible", ranges(("Cc", "Cf", "Co")))
elif sys.argv[1:] == ["folds"]:
    print("a code point, and those that replace it.")
    print_table("Replacement kWithoutAccents", replacements(without_accents))
    print_table("Replacement kLowerCase", replacements(str.lower))
else:
    sys.exit("unicode_ranges.py: expected ranges or folds")
