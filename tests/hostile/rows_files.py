"""Files that are not what they should be."""
import json
import os

from harness import TINY, Row

GPT = ["train", "gpt", *TINY]
SHAPE = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 1}


def pipe(path):
    os.mkfifo(path)


def dangling(path):
    path.symlink_to("nowhere")


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def shape(**changes):
    return json.dumps({**SHAPE, **changes})


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}

# A file of options.
CONFIGS = [
    ("missing", None, r"cannot read .*o\.json"),
    ("not JSON", "{", r"o\.json is not JSON"),
    ("a list", "[]", r"o\.json should be an object"),
    ("empty", "", r"o\.json is not JSON"),
    ("deep", "[" * 100000, r"o\.json is nested more than"),
    ("twice", '{"batch": 1, "batch": 2}', r"has the key .*batch.* twice"),
    ("unknown", '{"bacth": 1}', r"there is no option 'bacth'; did you mean 'batch'\?"),
    ("a word for a number", '{"batch": "8"}', r"batch should be a whole number"),
    ("NaN", '{"lr": NaN}', r"is not JSON"),
    ("a huge number", '{"lr": 1e999}', r"o\.json"),
    ("out of range", '{"threads": 1000000}', r"threads expects a whole number from 1 to 1024"),
    ("beyond 64 bits", '{"seed": 18446744073709551617}', r"seed should be a whole number"),
    ("null", '{"batch": null}', r"batch should be a whole number"),
    ("not UTF-8", b'{"prompt": "\xff"}', r"o\.json is not JSON"),
    ("two megabytes", '{"prompt": "' + "x" * 2_000_000 + '"}', r"at most 1000000 are"),
]

# The config.json of the model to start from; errors name it, and no option that nobody gave.
INITS = [
    ("cut", '{"model_type": "gpt2", ', r"m/config\.json is not JSON"),
    ("no object", "[]", r"m/config\.json is no config\.json of a model"),
    ("empty", "", r"m/config\.json is no config\.json of a model"),
    ("negative", '{"model_type": "gpt2", "n_layer": -1}', r"m/config\.json"),
    ("of wrong types", '{"model_type": "gpt2", "n_embd": "8"}', r"m/config\.json"),
]

# A model's config.json, and what is said of it.
SHAPES = [
    ("a million wide", shape(n_embd=1000000), r"takes .* GiB"),
    ("a billion layers", shape(n_layer=1000000000), r"takes .* GiB"),
    ("two billion positions", shape(n_positions=2000000000, n_embd=1024), r"takes .* GiB"),
    ("no heads", shape(n_head=0), r"cannot be cut into 0 heads"),
    ("negative", shape(n_layer=-1), r"should not be negative"),
    ("beyond", shape(n_layer=1 << 62), r"too large"),
    ("a word", shape(n_layer="many"), r"n_layer should be"),
    ("too few tokens", shape(vocab_size=10), r"the model has 10 tokens"),
    ("too few positions", shape(n_positions=8), r"sees 8 tokens at most"),
    ("another activation", shape(activation_function="relu"), r"activation_function must be"),
]

# model.safetensors of a run's last checkpoint, for generate.
WEIGHTS = [
    ("empty", b"", r"has 0 bytes"),
    ("garbage", b"\xff" * 64, r"Is this a safetensors file"),
    ("cut", safetensors({"x": TENSOR}, b"abc"), r"it was cut off"),
    ("not JSON", safetensors(b"{]"), r"is not JSON"),
    ("a word for a tensor", safetensors({"x": 7}), r'model\.safetensors: tensor "x" should be an object'),
    ("shape", safetensors({"x": {**TENSOR, "shape": 7}}, b"abcd"), r'model\.safetensors: tensor "x": shape should be'),
    ("negative shape", safetensors({"x": {**TENSOR, "shape": [-1]}}, b"abcd"), r'model\.safetensors: tensor "x": shape should not be negative'),
    ("offsets", safetensors({"x": {**TENSOR, "data_offsets": 7}}, b"abcd"), r'model\.safetensors: tensor "x": data_offsets should be'),
    ("dtype", safetensors({"x": {**TENSOR, "dtype": 7}}, b"abcd"), r'model\.safetensors: tensor "x": dtype should be'),
    ("overflow", safetensors({"x": {"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 0]}}), r'model\.safetensors: tensor "x": '),
    ("overflow in two", safetensors({"x": {"dtype": "F32", "shape": [1 << 32, 1 << 32], "data_offsets": [0, 0]}}), r'model\.safetensors: tensor "x": '),
    ("metadata", safetensors({"__metadata__": {"k": 1}}), r"model\.safetensors: __metadata__: k should be a string"),
    ("other tensors", safetensors({"x": TENSOR}, b"abcd"), r"do not belong together|does not fit"),
]
MODEL = {"config.json": shape(), "merges.txt": "#version: 0.2\n", "vocab.json": "{}"}

# What `flight` is given.
FLIGHTS = [
    ("missing", None, r"cannot read"),
    ("a folder", {"dump/x": "y"}, r"no records \(\*\.json\) in dump"),
    ("the folder of a job", {"dump/a.json": '{"format": "x"}', "dump/b.txt": "{"}, r"unknown format"),
    ("a pipe", {"dump": pipe}, r"dump.*not a regular file"),
    ("not JSON", {"dump": "{"}, r"dump is not JSON"),
    ("empty", {"dump": ""}, r"dump is not JSON"),
    ("a list", {"dump": "[]"}, r"not a dump of a flight recorder"),
    ("another format", {"dump": '{"format": "x"}'}, r"unknown format"),
    ("wrong types", {"dump": '{"format": "chorale-flight-1", "group": 1, "members": "x", "rank": [], "error": {}, "calls": 1}'}, r"not a dump"),
]


def rows():
    found = []
    for name, content, says in CONFIGS:
        files = {} if content is None else {"o.json": content}
        found.append(Row(f"files/config {name}", [*GPT, "--config", "o.json"], files=files, status={1, 2}, says=(says,)))
    for name, content, says in SHAPES:
        found.append(Row(f"files/model-config {name}", [*GPT, "-n", "1", "--model-config", "shape.json", "--dry-run"], files={"shape.json": content},
                         says=(says,), within=20))
    for name, content, says in WEIGHTS:
        found.append(Row(f"files/weights {name}", ["generate", "--run", "m"],
                         files={**{f"m/{file}": text for file, text in MODEL.items()}, "m/model.safetensors": content}, says=(says,), within=20))
    for name, files, says in FLIGHTS:
        found.append(Row(f"files/flight {name}", ["flight", "dump"], files=files or {}, says=(says,), within=10))
    found += [
        Row("files/config a folder", [*GPT, "--config", "o"], files={"o": None}, says=("not a regular file",)),
        Row("files/config a pipe", [*GPT, "--config", "o"], files={"o": pipe}, says=("not a regular file",), within=10),
        Row("files/text missing", ["train", "gpt", "--text", "nowhere"], says=("cannot read .*nowhere",)),
        Row("files/text a folder", ["train", "gpt", "--text", "."], says=("not a regular file",)),
        Row("files/text a pipe", ["train", "gpt", "--text", "p"], files={"p": pipe}, says=("not a regular file",), within=10),
        Row("files/text a device", ["train", "gpt", "--text", "/dev/zero"], says=("not a regular file",), within=10),
        Row("files/text empty", ["train", "gpt", "-n", "1", "--text", "e", "--tokenizer", "bytes"], files={"e": ""}, says=("tokens only, too few",)),
        Row("files/text short", ["train", "gpt", "-n", "1", "--text", "e", "--tokenizer", "bytes"], files={"e": "ab"}, says=("tokens only, too few",)),
        Row("files/text of a terabyte", ["train", "gpt", "-n", "1", "--text", "e"], files={"e": sparse}, says=(r"a text of 1024 GiB takes",), within=20),
        Row("files/text with a name that is not UTF-8", ["train", "gpt", "--text", b"\xff"], status=2, says=(r"--text is written down and must be UTF-8",)),
        Row("files/tokenizer missing", ["train", "gpt", "--text", "text", "--tokenizer", "nowhere"], says=("--tokenizer expects auto, bytes",)),
        Row("files/tokenizer damaged", ["train", "gpt", "-n", "1", "--text", "text", "--tokenizer", "t"], files={"t/vocab.json": "{", "t/merges.txt": ""},
            says=(r"vocab\.json",)),
        Row("files/init missing", ["train", "gpt", "--text", "text", "--init", "nowhere"], says=("nowhere",)),
        Row("files/init a file", ["train", "gpt", "--text", "text", "--init", "text"], says=("text",)),
        *[Row(f"files/init with config.json {name}", ["train", "gpt", "--text", "text", "--init", "m"], files={"m/config.json": content}, says=(says,),
              never_says=("--model-config",)) for name, content, says in INITS],
        Row("files/init of another size", [*GPT[:6], "-n", "1", "--context", "16", "--init", "m"],
            files={**{f"m/{file}": text for file, text in MODEL.items() if file == "config.json"}, "m/model.safetensors": safetensors({"x": TENSOR}, b"abcd")},
            says=("do not belong together|does not fit",)),
        Row("files/generate without a run", ["generate", "--run", "nowhere"], says=("--run nowhere is no folder",)),
        Row("files/generate from a file", ["generate", "--run", "text"], says=("--run text is no folder",)),
        Row("files/generate from an empty folder", ["generate", "--run", "f"], files={"f": None}, says=("there is no checkpoint in f",)),
        Row("files/generate with a config of another size", ["generate", "--run", "m"],
            files={"m/config.json": shape(n_embd=1000000), "m/model.safetensors": safetensors({"x": TENSOR}, b"abcd")}, says=("do not belong together",), within=20),
        Row("files/report nowhere", ["report", "nowhere"], says=("is no folder",)),
        Row("files/report of a file", ["report", "text"], says=("is no folder",)),
        Row("files/report of an empty folder", ["report", "f"], files={"f": None}, says=("has no metrics.jsonl",)),
        Row("files/report of a pipe", ["report", "f"], files={"f/metrics.jsonl": pipe}, says=("has no metrics.jsonl that is a regular file",), within=10),
        Row("files/report of a folder", ["report", "f"], files={"f/metrics.jsonl": None}, says=("has no metrics.jsonl that is a regular file",)),
        Row("files/report of garbage", ["report", "f"], files={"f/metrics.jsonl": b"\xff\n{}\n[]\nx\n"}, status=0, says=("line 1", "line 4"), may_make="f/report.html"),
        Row("files/report to a device", ["report", "f", "-o", "/dev/null"], files={"f/metrics.jsonl": "{}\n"}, says=("/dev/null.*not a regular file",),
            check=lambda _: None if not os.path.isfile("/dev/null") else "/dev/null was replaced"),
        Row("files/report to a pipe", ["report", "f", "-o", "p"], files={"f/metrics.jsonl": "{}\n", "p": pipe}, says=("not a regular file",)),
        Row("files/report to a link", ["report", "f", "-o", "l"], files={"f/metrics.jsonl": "{}\n", "l": dangling}, says=("is a symbolic link to .*nowhere",)),
        Row("files/report to a folder", ["report", "f", "-o", "f"], files={"f/metrics.jsonl": "{}\n"}, says=("not a regular file",)),
        Row("files/report to nowhere", ["report", "f", "-o", "x/y.html"], files={"f/metrics.jsonl": "{}\n"}, says=("cannot write .*x/y.html",)),
        Row("files/report of a name that is not UTF-8", ["report", b"\xff"], files={"text2": "", }, says=("is no folder",)),
        Row("files/watch nowhere", ["watch", "nowhere", "--port", "0"], says=("is no folder",), within=10),
        Row("files/watch a file", ["watch", "text", "--port", "0"], says=("is no folder",), within=10),
        Row("files/ops of no name", ["ops", "matmull"], says=(r"there is no op 'matmull'; did you mean 'matmul'\?",)),
    ]
    return found
