"""Writes a made-up run, as a trainer would leave it: for tests of reports, and for people who work on the page.

  example_run.py FOLDER [--kind fashion|gpt] [--lines N] [--seed S]
"""
import argparse
import base64
import json
import math
import pathlib
import random

NAMES = ["T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


def metrics(kind, lines, seed, ranks=2):
    """The lines of metrics.jsonl as objects: one of training every ten steps."""
    rng = random.Random(seed)
    floor, top = (0.2, 2.3) if kind == "fashion" else (1.4, 5.5)
    seconds = 0
    yield {"kind": "start", "step": 0, "seconds": 0, "version": "0.1.0", "processor": "Example CPU @ 2.0 GHz", "cores": 2,
           "task": kind, "ranks": ranks, "threads": 1, "parameters": 421642, "steps": 10 * lines,
           "used": {"steps": 10 * lines, "device": "cpu"}}
    for line in range(1, lines + 1):
        step, done = 10 * line, line / lines
        seconds += 0.3 * (1 + 0.3 * rng.random())
        clean = (top - floor) * math.exp(-6 * done ** 0.7)
        loss = max(0.01, floor + clean + 0.08 * rng.gauss(0, 1) * (floor + 0.5))
        common = {"step": step, "seconds": round(seconds, 3)}
        accuracy = 0.93 - 0.3 * math.exp(-5 * done)
        score = {"accuracy": accuracy + 0.01 * rng.gauss(0, 1)} if kind == "fashion" else {"bits_per_byte": loss / math.log(2)}
        yield {"kind": "train", **common, "loss": loss, **score, "lr": 2e-3 * math.sin(math.pi * min(1, done + 0.05)) ** 2,
               "epoch": 5 * done, "step_ms": 30, "exposed_communication_ms": 1.5 + 0.5 * rng.random(),
               "pictures_per_second" if kind == "fashion" else "tokens_per_second": 4000 + 300 * rng.gauss(0, 1)}
        if line % max(1, lines // 10) == 0:
            for rank in range(ranks):
                yield {"kind": "time", **common, "rank": rank, "compute_ms": 26 + 2 * rng.random() + rank,
                       "exposed_ms": 2.5 + rng.random(), "hidden_ms": 6 + rng.random(), "memory_mib": 180 + 3 * rank + 5 * done}
            test_loss = floor * 1.2 + clean
            if kind == "fashion":
                yield {"kind": "evaluation", **common, "test_loss": test_loss, "test_accuracy": accuracy - 0.01}
            else:
                yield {"kind": "evaluation", **common, "test_loss": test_loss, "test_bits_per_byte": test_loss / math.log(2)}
                yield {"kind": "sample", **common, "text": "And it came to pass in those <b>days</b>,\nthat " + " ".join(
                    rng.choice(["the", "king", "of", "Israel", "went", "unto", "LORD", "and", "said"]) for _ in range(60))}


def evaluation(seed):
    rng = random.Random(seed)
    confusion = [[0] * 10 for _ in range(10)]
    for label in range(10):
        wrong = 230 if label == 6 else rng.randrange(15, 150)
        confusion[label][label] = 1000 - wrong
        for _ in range(wrong):
            confusion[label][rng.choice([guess for guess in range(10) if guess != label])] += 1
    worst = []
    for i in range(24):
        label = rng.randrange(10)
        pixels = bytes(max(0, min(255, int(255 * math.exp(-((x - 14) ** 2 + (y - 14) ** 2) / (30 + 10 * label)) + rng.gauss(0, 9))))
                       for y in range(28) for x in range(28))
        worst.append({"index": rng.randrange(10000), "label": label, "guess": (label + 1 + rng.randrange(8)) % 10,
                      "probability": 1 - 0.003 * (i + 1), "pixels": base64.b64encode(pixels).decode()})
    return {"names": NAMES, "confusion": confusion, "width": 28, "height": 28, "worst": worst}


def config(seed):
    return {"model": "cnn", "epochs": 5, "batch": 128, "lr": 0.002, "schedule": "one-cycle", "seed": seed, "precision": "f32",
            "steps": 0, "device": "auto"}


def write(folder, kind="fashion", lines=300, seed=1):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(seed)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics(kind, lines, seed)))
    if kind == "fashion":
        (folder / "evaluation.json").write_text(json.dumps(evaluation(seed)))
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--kind", choices=["fashion", "gpt"], default="fashion")
    parser.add_argument("--lines", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    write(**vars(parser.parse_args()))
