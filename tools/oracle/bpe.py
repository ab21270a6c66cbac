#!/usr/bin/env python3
"""Records what the `tokenizers` package makes of small texts, for text/bpe_test.cc and text/words_test.cc.

    /path/to/venv/bin/python tools/oracle/bpe.py > src/chorale/text/testdata/bpe.inc

The venv needs tokenizers. Recorded: the pieces that its byte-level pre-tokenizer cuts texts into; the merges that its trainer
finds in a text; what the encoder makes of other texts. With --check FOLDER TEXT it loads vocab.json and merges.txt from the
folder, encodes the text file and prints the number of tokens and a checksum (FNV-1a of the ids as four bytes each).
"""
import json
import sys

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = """In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was
upon the face of the deep. And the Spirit of God moved upon the face of the waters. And God said, Let there be light: and
there was light. And God saw the light, that it was good: and God divided the light from the darkness. And God called the
light Day, and the darkness he called Night. And the evening and the morning were the first day. And God said, Let there be
a firmament in the midst of the waters, and let it divide the waters from the waters. And God made the firmament, and divided
the waters which were under the firmament from the waters which were above the firmament: and it was so. And God called the
firmament Heaven. And the evening and the morning were the second day. And God said, Let the waters under the heaven be
gathered together unto one place, and let the dry land appear: and it was so.
    int main() { return 0; }  // 1234567890 12 12 12
It's what they'll say; we've said it, I'm sure they'd agree, you're right, don't you? Café, naïve, Ünïcödé, 日本語 日本語, 你好.
"""
TEXTS = [
    "", " ", "  ", "\n", " \n ", "a", " a", "  a", "a  ", "a \n b", "\n\na", "\t\tx", "In the beginning", "the waters were",
    "don't DON'T we'll 'tis 's 'S x'd 've", "1234 a1b2 ½²³ Ⅷ ٣٤", "Ünïcödé naïve 日本語のテキスト 한국어 Ελληνικά русский",
    "🙂🙃 emoji 👩‍👩‍👧", "a\u00a0b\u3000c\u2003 d", "x\u0085y\u2028z", "!!!...??? (a+b)*c == d;", "   leading and trailing   ",
    "tabs\tand\r\nnewlines\r\n\r\n  mixed \t ", "e\u0301 combining", "\u200bzero\u200dwidth", "hello\x00world\x01\x7f", "a" * 70,
    "<|endoftext|>",
]


def literal(text):
    """A C++ string literal of any UTF-8 text."""
    content = text.encode()
    escaped = "".join(chr(b) if 0x20 <= b < 0x7f and chr(b) not in '"\\?' else f"\\{b:03o}" for b in content)
    return f'std::string_view("{escaped}", {len(content)})'


def byte_level(model):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def main():
    if sys.argv[1:2] == ["--check"]:
        folder, path = sys.argv[2:]
        tokenizer = byte_level(models.BPE.from_file(folder + "/vocab.json", folder + "/merges.txt"))
        with open(path, encoding="utf-8", newline="") as file:
            ids = tokenizer.encode(file.read()).ids
        checksum = 0xcbf29ce484222325
        for token in ids:
            for byte in token.to_bytes(4, "little"):
                checksum = (checksum ^ byte) * 0x100000001b3 % 2**64
        print(len(ids), f"{checksum:016x}")
        return

    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=420, min_frequency=2, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([CORPUS], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]

    print(f"// Recorded by tools/oracle/bpe.py with tokenizers {tokenizers.__version__}.")
    print("constexpr std::string_view kCorpus =")
    for line in CORPUS.splitlines(keepends=True):
        content = line.encode()
        print('    "' + "".join(chr(b) if 0x20 <= b < 0x7f and chr(b) not in '"\\?' else f"\\{b:03o}" for b in content) + '"')
    print("    ;")
    print("constexpr std::string_view kMerges =")
    for merge in merges:
        print('    "' + "".join(chr(b) if 0x20 <= b < 0x7f and chr(b) not in '"\\?' else f"\\{b:03o}" for b in merge.encode())
              + '\\n"')
    print("    ;")
    print(f"constexpr int32_t kVocabSize = {len(model['vocab'])};")
    print("const Encoded kTexts[] = {")
    for text in TEXTS:
        pieces = [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        assert "".join(pieces) == text, (text, pieces)
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
        print(f"    {{{literal(text)},")
        print("     {" + ", ".join(literal(piece) for piece in pieces) + "},")
        print("     {" + ", ".join(map(str, ids)) + "}},")
    print("};")


main()
