"""Options that cannot be: a message with the range, and status 2, before anything starts."""
from harness import TINY, Row

HUGE = "9223372036854775807"
BEYOND = "99999999999999999999"
GPT = ["train", "gpt", *TINY]

# Option of `train gpt`, values that it refuses, what it says then.
TRAIN = [
    ("epochs", ["0", "-1", HUGE, BEYOND, "1.5", "nan", "", " 3", "0x10", "３"], r"--epochs expects a whole number from 1 to 1000000000, not"),
    ("steps", ["-1", BEYOND, "inf"], r"--steps expects a whole number from 0 to"),
    ("batch", ["0", HUGE, "-8"], r"--batch expects a whole number from 1 to 1000000000"),
    ("accumulate", ["0", "4611686018427387904", "-1"], r"--accumulate expects a whole number from 1 to 1000000, not"),
    ("ranks", ["-1", "4294967297", "65537"], r"--ranks expects a whole number from 0 to 65536, not"),
    ("threads", ["0", "1000000", "4294967297"], r"--threads expects a whole number from 1 to 1024, not"),
    ("lr", ["inf", "nan", "-1", "1e300", "1e999", "two"], r"--lr expects a number from 0 to 1000000, not"),
    ("weight-decay", ["nan", "-inf"], r"--weight-decay expects a number from 0 to"),
    ("clip", ["-1", "inf"], r"--clip expects a number from 0 to 1000000000, not"),
    ("warmup", ["-1", BEYOND], r"--warmup expects a whole number from 0 to"),
    ("seed", ["-1", "18446744073709551616"], r"--seed expects a whole number from 0 to 9223372036854775807, not"),
    ("log-every", ["0"], r"--log-every expects a whole number from 1"),
    ("keep", ["0", BEYOND], r"--keep expects a whole number from 1"),
    ("context", ["1", HUGE], r"--context expects a whole number from 2 to 16777216"),
    ("vocab", ["299", "16777217"], r"--vocab expects a whole number from 300 to 16777216"),
    ("layers", ["0", "1000000000"], r"--layers expects a whole number from 1 to 100000"),
    ("width", ["0", "1000000000"], r"--width expects a whole number from 1 to 10000000"),
    ("dropout", ["1", "-0.1", "nan"], r"--dropout expects a number from 0 to 0.999"),
    ("sample-tokens", ["-1", HUGE], r"--sample-tokens expects a whole number from 0 to 1000000"),
    ("nnodes", ["0", "4294967297"], r"--nnodes expects a whole number from 1 to 65536"),
    ("node-rank", ["-1", "4294967296"], r"--node-rank expects a whole number from 0 to 65535"),
    ("grace", ["inf", "1e300", "-1", "nan"], r"--grace expects a number from 0 to 1000000, not"),
    ("max-restarts", ["-1", "4294967297"], r"--max-restarts expects a whole number from 0 to 1000000"),
    ("optimizer", ["adamm", "", "\N{SNOWMAN}"], r"--optimizer expects one of adamw, adam, sgd"),
    ("precision", ["f8"], r"--precision expects one of f32, bf16, f16"),
    ("on-nan", ["ignore"], r"--on-nan expects one of stop, continue"),
]

# Words of other commands.
OTHERS = [
    ("run/-n 0", ["run", "-n", "0", "true"], r"--nproc-per-node expects a whole number from 1 to 65536, not 0"),
    ("run/-n 4294967297", ["run", "-n", "4294967297", "true"], r"from 1 to 65536, not 4294967297"),
    ("run/-n nothing", ["run", "-n", "", "true"], r"from 1 to 65536, not ''"),
    ("run/no -n", ["run", "true"], r"-n is required"),
    ("run/no program", ["run", "-n", "1"], r"PROGRAM is required"),
    ("run/unknown option", ["run", "--nproc", "2", "true"], r"no option --nproc"),
    ("run/nnodes", ["run", "-n", "1", "--nnodes", "4294967297", "true"], r"--nnodes expects a whole number from 1 to 65536"),
    ("run/node-rank without nodes", ["run", "-n", "1", "--node-rank", "1", "true"], r"--node-rank 1 is none of 1 node"),
    ("run/a million ranks", ["run", "-n", "65536", "--nnodes", "65536", "true"], r"more than 1000000 ranks"),
    ("run/grace inf", ["run", "-n", "1", "--grace", "inf", "true"], r"--grace expects a number from 0 to 1000000, not inf"),
    ("run/grace 1e300", ["run", "-n", "1", "--grace", "1e300", "true"], r"--grace expects a number"),
    ("run/grace nan", ["run", "-n", "1", "--grace", "nan", "true"], r"--grace expects a number"),
    ("run/max-restarts", ["run", "-n", "1", "--max-restarts", "-1", "true"], r"--max-restarts expects"),
    ("run/fabric", ["run", "-n", "1", "--fabric", "carrier-pigeon", "true"], r"'carrier-pigeon' is no fabric"),
    ("generate/temperature nan", ["generate", "--run", "x", "--temperature", "nan"], r"--temperature expects a number from 0 to 1000000"),
    ("generate/temperature -1", ["generate", "--run", "x", "--temperature", "-1"], r"--temperature expects"),
    ("generate/top-p 2", ["generate", "--run", "x", "--top-p", "2"], r"--top-p expects a number from 0 to 1, not 2"),
    ("generate/top-p nan", ["generate", "--run", "x", "--top-p", "nan"], r"--top-p expects"),
    ("generate/tokens -1", ["generate", "--run", "x", "--tokens", "-1"], r"--tokens expects a whole number from 0"),
    ("generate/threads", ["generate", "--run", "x", "--threads", "1000000"], r"--threads expects a whole number from 0 to 1024"),
    ("generate/no run", ["generate"], r"--run is required"),
    ("watch/port", ["watch", ".", "--port", "65536"], r"--port expects a whole number from 0 to 65535"),
    ("watch/port nan", ["watch", ".", "--port", "nan"], r"--port expects"),
    ("bench/rounds 0", ["bench", "ops", "--rounds", "0"], r"expects a number from 1 to 1000000, not 0"),
    ("bench/rounds nan", ["bench", "ops", "--rounds", "nan"], r"expects a number from 1"),
    ("bench/seconds nan", ["bench", "ops", "--seconds", "nan"], r"expects a number from 1e-06 to 3600"),
    ("bench/ranks", ["bench", "ddp", "-n", "4294967297"], r"expects a number from 1 to 256"),
    ("bench/peer", ["bench", "ops", "--against", "torch,pigeons"], r"no peer is called 'pigeons'; expected some of: torch, memcpy, onednn"),
    ("bench/hosts", ["bench", "collectives", "--hosts", "3"], r"expects a number from 1 to 2"),
    ("names/lernrate", ["train", "gpt", "--lernrate", "1"], r"no option --lernrate; did you mean '--lr'\?"),
    ("names/of the program, before it", ["run", "--lernrate", "1", "-n", "2", "true"], r"there is no option --lernrate; those of the program come after its name"),
    ("names/unknown, and one is missing", ["generate", "--lernrate", "1"], r"there is no option --lernrate"),
    ("elastic/a MAX above the batch", [*GPT, "-n", "2", "--batch", "4", "--elastic", "1:5"], r"a batch of 4 examples is too small for 5 ranks; give a larger --batch"),
    ("elastic/what stays of a job that is not", [*GPT, "-n", "2", "--elastic-batch", "local"], r"--elastic-batch local says .* give --elastic MIN:MAX, too"),
    ("empty/out", [*GPT, "--out", ""], r"--out expects a folder, not ''"),
    ("empty/log-dir", [*GPT, "--log-dir", ""], r"--log-dir expects a folder, not ''"),
    ("empty/log-dir of run", ["run", "-n", "1", "--log-dir", "", "true"], r"--log-dir expects a folder, not ''"),
    ("names/ephocs", ["train", "gpt", "--ephocs", "1"], r"did you mean '--epochs'\?"),
    ("names/no command", ["trian"], r"no command 'trian'; did you mean 'train'\?"),
    ("names/empty command", [""], r"no command|which one"),
    ("names/not UTF-8", [b"\xff\xfe"], r"no command"),
    ("names/very long", ["x" * 100000], r"no command"),
    ("names/no task", ["train"], r"which one\? \(commands: fashion-mnist, gpt, bert, recommender\)"),
    ("names/extra word", ["doctor", "please"], r"'please' was not expected"),
    ("names/prompt not UTF-8", [*GPT, "--prompt", b"\xff"], r"--prompt is written down and must be UTF-8, which '\\xff' is not"),
]


def rows():
    found = []
    for option, values, says in TRAIN:
        for index, value in enumerate(values):
            found.append(Row(f"options/train/{option} {value or 'nothing'}", [*GPT, "--" + option, value], status=2, says=(says,), ci=index < 2))
    found += [Row(f"options/{name}", words, status=2, says=(says,)) for name, words, says in OTHERS]
    found += [
        Row("options/train/epochs that are too many steps", [*GPT, "-n", "1", "--epochs", "1000000000", "--batch", "1", "--dry-run"], status=0,
            says=("steps ",), ci=False),
        Row("options/train/bert context 3", ["train", "bert", "--text", "text", "--context", "3", "-n", "1", "--dry-run"],
            says=("a --context of 3 is too small",)),
        Row("options/train/bert masked 0", ["train", "bert", "--masked", "0"], status=2, says=("--masked expects a number from 0.01 to 1",)),
        Row("options/train/heads that do not divide", [*GPT, "--heads", "3"], says=("cannot be dealt to 3 heads",)),
        Row("options/train/batch that does not divide", [*GPT, "-n", "3"], says=("choose a multiple of 3",), within=20),
        Row("options/train/batch beyond the data", [*GPT, "-n", "1", "--batch", "100000"], says=("is larger than the",)),
        Row("options/train/accumulate and ranks", [*GPT, "-n", "2", "--accumulate", "1000000"], says=("choose a multiple of 2000000",)),
        Row("options/train/width of a million", [*GPT, "-n", "1", "--width", "1000000"], says=(r"takes .* GiB .* this machine has",), within=20),
        Row("options/train/width of a million, dry", [*GPT, "-n", "1", "--width", "1000000", "--dry-run"], says=(r"takes .* GiB",), within=20),
        Row("options/train/a hundred thousand layers", [*GPT, "-n", "1", "--width", "1000", "--layers", "100000"], says=(r"takes .* GiB",), within=20),
        Row("options/train/resume without a folder", ["train", "gpt", "--resume"], says=("--resume needs the folder",)),
        Row("options/train/repeated options: the last counts", [*GPT, "--steps", "0", "--steps", "2", "-n", "1", "--dry-run"], status=0, says=("steps        2 of",)),
        Row("options/run/no such program", ["run", "-n", "2", "./nowhere"], status=127, says=("nowhere",)),
        Row("options/run/a folder as program", ["run", "-n", "2", "."], status={126, 127}),
        Row("options/help", ["--help"], status=0, says=("train", "doctor")),
        Row("options/help of all", ["--help-all"], status=0, says=("--port", "fashion-mnist")),
        Row("options/version", ["--version"], status=0, says=(r"chorale \d",)),
    ]
    return found
