"""Records what the model families compute in transformers and torchvision, as the independent judge of ours.

  python3 tools/oracle/record_models.py      (PyTorch 2.15, transformers 5.22, torchvision 0.29; see docs/dev/dependencies.md)

Weights and inputs are made by the formulas of record_trajectories.py; kept are logits, the loss, and of every parameter's gradient a few
values and a weighted sum. src/chorale/models/oracle_test.cc compares. Tokens that GPT-2 generates greedily are kept whole.
"""
import json
import pathlib

import torch
import torch.nn.functional as F
from torchvision.models import resnet18, resnet50
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from ops_oracle import Input
from record_modules import brief, number
from record_trajectories import fill

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def ids(shape, seed, high):
    return Input(shape, "i64", seed, 0, high).tensor()


def record(model, logits, target):
    """Also the names of the state dict: they are what lets checkpoints travel."""
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten())
    loss.backward()
    return {"logits": brief(logits), "loss": number(loss.item()),
            "grad": {n: brief(p.grad) for n, p in model.named_parameters()},
            "buffers": {n: brief(b) for n, b in model.named_buffers() if b.dtype.is_floating_point},
            "names": list(model.state_dict())}


def gpt2():
    # Random weights would soon repeat one token; larger ones keep greedy generation lively.
    model = GPT2LMHeadModel(GPT2Config(vocab_size=23, n_positions=24, n_embd=12, n_layer=2, n_head=3, bos_token_id=None, eos_token_id=None))
    fill(model)
    model.eval()
    x = ids([2, 7], 1, 23)
    entry = record(model, model(x).logits, ids([2, 7], 2, 23))
    entry["generated"] = model.generate(x, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(x)).tolist()
    return entry


def bert():
    model = BertForMaskedLM(BertConfig(vocab_size=23, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20,
                                       max_position_embeddings=10))
    fill(model)
    model.eval()
    x, mask = ids([2, 7], 1, 23), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    return record(model, model(x, attention_mask=mask, token_type_ids=ids([2, 7], 3, 2)).logits, ids([2, 7], 2, 23))


def resnet(make, size, train):
    model = make(num_classes=7)
    fill(model)
    model.train(train)
    x = Input([2, 3, size, size], "f64", 1, -1.0, 1.0).tensor()
    entry = record(model, model(x), ids([2], 2, 7))
    if not train:  # the larger one: only values
        del entry["grad"], entry["buffers"]
        return entry
    # A checksum for a few places is enough: whatever is wrong below shows above.
    entry["grad"] = {n: g for n, g in entry["grad"].items() if n in ("conv1.weight", "bn1.bias", "layer4.0.downsample.0.weight", "fc.bias")}
    entry["buffers"] = {n: b for n, b in entry["buffers"].items() if n.startswith(("bn1.", "layer4.1.bn2."))}
    return entry


if __name__ == "__main__":
    result = {"gpt2": gpt2(), "bert": bert(), "resnet18": resnet(resnet18, 64, train=True), "resnet50": resnet(resnet50, 40, train=False)}
    path = ROOT / "tests" / "oracle" / "models.json"
    path.write_text(json.dumps(result, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    print(result["gpt2"]["generated"], path.stat().st_size)
