#!/usr/bin/env python3
"""Records what the `tokenizers` package makes of small texts with BERT's tokenizer, for text/wordpiece_test.cc.

    /path/to/venv/bin/python tools/oracle/wordpiece.py > src/chorale/text/testdata/wordpiece.inc

The venv needs tokenizers. Recorded: a vocabulary, and the ids of texts for an uncased model, a cased one, and one that lowers its
letters but keeps their accents.
"""
import re

import tokenizers
from tokenizers import BertWordPieceTokenizer

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ("the The beginning begin god God created heaven and earth it is what they say don ' t ## # caf café naive naïve un unab "
         "un able ünder under straße strasse 日 本 語 ᄒ ᅡ ᆫ σ Σ i I İ x y z a b c d e f g 1 2 3 ! \" $ % & ( ) * + , - . / : ; < = > ? @ [ ] ^ _ "
         "` { | } ~ ¿ “ ” … · mask MASK 🙂 e é א ב क ñ Ελλ ελλ").split()
PIECES = "s ing ning aff able able d the e é er ᅡ ᆫ a b c 1 2 3 σ ς i x 🙂 ηνικα ηνικά ש ा o ö".split()
TEXTS = [
    "", " ", "\n", "The beginning", "THE BEGINNING's end", "unaffable", "unaffablex", "God  created\tthe\nheaven and the earth.",
    "don't say it!", "café CAFÉ cafe\u0301 naïve NAÏVE", "straße STRASSE ẞ", "日本語 x日y本z", "한 하 한국어", "Σ ΣΣ aΣ ΑΣ", "İ I i ı",
    "1.5 $3 + 2 = a_b <x> [MASK] [UNK] ~`^|", "¿what? “x” … a·b", "a\u00a0b\u3000c\u2003d\u0085e", "a\u200bb\u00adc\u200dd\u0000e\ufeff", "a\ufffdb",
    "🙂🙂 🙃", "שאב क ा का", "Ελληνικά ΕΛΛΗΝΙΚΑ", "ünder UNDER Under", "a" * 100, "a" * 101, "\u037e \u1fef \u0344a \u212b", "\ue000x", "e\u0301é",
    "## # the## ##the", "ñ Ñ n\u0303",
]


def literal(text):
    """A C++ string literal of any UTF-8 text."""
    content = text.encode()
    escaped = "".join(chr(b) if 0x20 <= b < 0x7f and chr(b) not in '"\\?' else f"\\{b:03o}" for b in content)
    return f'std::string_view("{escaped}", {len(content)})'


def main():
    tokens = list(dict.fromkeys([*SPECIALS, *WORDS, *("##" + piece for piece in PIECES)]))
    vocab = {token: index for index, token in enumerate(tokens)}
    print(f"// Recorded by tools/oracle/wordpiece.py with tokenizers {tokenizers.__version__}.")
    print("constexpr std::string_view kVocab =")
    for token in tokens:
        print("    " + literal(token + "\n").removeprefix("std::string_view(").rpartition(",")[0].replace("\\012", "\\n"))
    print("    ;")
    for name, options in (("kUncased", {"lowercase": True}), ("kCased", {"lowercase": False}),
                          ("kLowerWithAccents", {"lowercase": True, "strip_accents": False})):
        tokenizer = BertWordPieceTokenizer(vocab, **options)
        print(f"const Encoded {name}[] = {{")
        for text in TEXTS:
            # Text that names a special is a special there; here no text gives one.
            parts = re.split(r"(?<=\[)", text)
            ids = [index for part in parts for index in tokenizer.encode(part, add_special_tokens=False).ids]
            print(f"    {{{literal(text)}, {{{', '.join(map(str, ids))}}}}},")
        print("};")


main()
