#!/usr/bin/env python3
"""Checks that TensorBoard reads what a run wrote: every number of metrics.jsonl, at its step, and the samples.

    /path/to/venv/bin/python tools/oracle/event_files.py RUN

The venv needs tensorboard. Exits with 1 and says what differs.
"""
import json
import pathlib
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def main():
    run = pathlib.Path(sys.argv[1])
    events = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    scalars = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags["scalars"]}
    wrong, compared = [], 0
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] not in ("train", "evaluation"):
            continue
        for name, value in row.items():
            if name in ("kind", "step", "seconds"):
                continue
            found = [steps.get(row["step"]) for tag, steps in scalars.items() if tag == name or tag.endswith("/" + name)]
            compared += 1
            if not any(one is not None and abs(one - value) <= 1e-6 * abs(value) + 1e-30 for one in found):
                wrong.append(f"step {row['step']}: {name} is {value}, TensorBoard has {found}")
    samples = [event.tensor_proto.string_val[0].decode() for tag in tags["tensors"] for event in events.Tensors(tag)]
    written = [row["text"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row["kind"] == "sample"]
    if samples != written:
        wrong.append(f"{len(written)} samples were written, TensorBoard has {len(samples)}, or others")
    for line in wrong[:20]:
        print(line)
    print(f"{compared} numbers compared, {len(wrong)} differ; {len(samples)} samples; tags: {', '.join(sorted(scalars))}")
    return 1 if wrong or not compared else 0


sys.exit(main())
