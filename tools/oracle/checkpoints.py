#!/usr/bin/env python3
"""Checkpoints between transformers and models/checkpoint.h, both ways.

    python tools/oracle/checkpoints.py record           writes tests/oracle/checkpoints, which models/checkpoint_test.cc reads
    python tools/oracle/checkpoints.py check PROGRAM    PROGRAM: the built example checkpoints (build/debug/bin/examples)

The venv needs torch and transformers. `record` makes a small GPT-2 and a small BERT with random weights (the BERT in shards) and
keeps their files and logits. `check` makes larger ones, lets PROGRAM load them, print logits and save them again in its own
way, loads that with transformers, and compares all logits.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

FOLDER = pathlib.Path(__file__).resolve().parent.parent.parent / "tests" / "oracle" / "checkpoints"
TOLERANCE = 1e-4


def gpt2(**config):
    return GPT2LMHeadModel(GPT2Config(bos_token_id=None, eos_token_id=None, **config)).eval()


def bert(**config):
    return BertForMaskedLM(BertConfig(**config)).eval()


def ids_for(vocab_size, tokens):
    return [(7 * i + 3) % vocab_size for i in range(tokens)]


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def record():
    torch.manual_seed(1)
    models = {
        "gpt2": (gpt2(vocab_size=23, n_positions=16, n_embd=12, n_layer=2, n_head=3, initializer_range=0.5), "5GB"),
        "bert": (bert(vocab_size=23, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20,
                      max_position_embeddings=16, initializer_range=0.5), "4KB"),
    }
    for name, (model, shard) in models.items():
        folder = FOLDER / name
        model.save_pretrained(folder, max_shard_size=shard)
        (folder / "generation_config.json").unlink(missing_ok=True)
        ids = ids_for(23, 9)
        logits = [[round(value, 6) for value in row] for row in logits_of(model, ids).tolist()]
        (folder / "logits.json").write_text(json.dumps({"ids": ids, "logits": logits}) + "\n")


def check(program):
    torch.manual_seed(2)
    models = {
        "gpt2": (gpt2(vocab_size=501, n_positions=64, n_embd=96, n_layer=4, n_head=6, initializer_range=0.1), GPT2LMHeadModel),
        "bert": (bert(vocab_size=501, hidden_size=96, num_hidden_layers=4, num_attention_heads=6, intermediate_size=200,
                      max_position_embeddings=64, initializer_range=0.1), BertForMaskedLM),
    }
    worst = 0.0
    for name, (model, kind) in models.items():
        ids = ids_for(501, 40)
        expected = logits_of(model, ids)
        for shard in ("5GB", "300KB"):
            with tempfile.TemporaryDirectory() as folder:
                theirs, ours = folder + "/theirs", folder + "/ours"
                model.save_pretrained(theirs, max_shard_size=shard)
                output = subprocess.run([program, name, theirs, ours, *map(str, ids)], check=True, capture_output=True, text=True)
                loaded = torch.tensor([[float(x) for x in line.split()] for line in output.stdout.splitlines()])
                back = logits_of(kind.from_pretrained(ours).eval(), ids)
                there, again = ((logits - expected).abs().max().item() for logits in (loaded, back))
                print(f"{name}, shards of {shard}: logits differ by {there:.1e} here, by {again:.1e} on the way back")
                worst = max(worst, there, again)
    if not worst <= TOLERANCE:
        sys.exit(f"more than {TOLERANCE}")


if sys.argv[1:] == ["record"]:
    record()
elif sys.argv[1:2] == ["check"] and len(sys.argv) == 3:
    check(sys.argv[2])
else:
    sys.exit(__doc__)
