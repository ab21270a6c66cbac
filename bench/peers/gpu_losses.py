"""Do we learn as PyTorch does? Losses of GPT-2 (124M, B 4, T 256, dropout 0) over 300 steps on text, from the same weights and batches.

  python3 gpu_losses.py --chorale ./chorale [--steps N] [--text FILE...] [--json FILE]

f32 (without TF32) must agree to 1e-3, on average over the last 50 steps; bf16 over f32 weights must be no further away than PyTorch's
runs with other seeds are from each other. Needs a GPU, PyTorch and transformers. The texts are the pages of docs/ unset: their bytes
are the tokens.
"""
import argparse, glob, json, os, subprocess, sys, tempfile
import numpy as np
import torch, torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, LENGTH, LR, LAST = 4, 256, 1e-4, 50


def batches(text, steps, seed):
    starts = np.random.default_rng(seed).integers(0, len(text) - LENGTH - 1, (steps, BATCH))
    return np.stack([[text[s:s + LENGTH + 1] for s in row] for row in starts]).astype(np.int64)


def torch_losses(folder, tokens, lower):
    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa").cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, fused=True)
    losses = []
    for batch in torch.from_numpy(tokens).cuda():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=lower):
            loss = F.cross_entropy(model(batch[:, :-1], use_cache=False).logits.flatten(0, -2), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().float())
    return torch.stack(losses).cpu().numpy()


def our_losses(program, folder, tokens_file, out, lower):
    command = [program, "bench", "gpu-losses", "--model", folder, "--tokens", tokens_file, "--out", out, "--lr", str(LR), "--compiled"]
    subprocess.run(command + (["--bf16"] if lower else []), check=True)
    return np.load(out)


def last(losses):
    return float(losses[-LAST:].mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chorale", required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", nargs="*")
    parser.add_argument("--json")
    args = parser.parse_args()
    pages = args.text or sorted(glob.glob(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../docs/**/*.md"), recursive=True))
    text = np.frombuffer(b"".join(open(page, "rb").read() for page in pages), np.uint8)
    torch.backends.cuda.matmul.allow_tf32 = False
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        tokens = batches(text, args.steps, 0)
        tokens_file = os.path.join(folder, "tokens.npy")
        np.save(tokens_file, tokens)

        def make_model(seed):
            torch.manual_seed(seed)
            where = os.path.join(folder, f"model{seed}")
            GPT2LMHeadModel(GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).save_pretrained(where)
            return where

        first = make_model(0)
        for name, lower in (("f32", False), ("bf16", True)):
            theirs = torch_losses(first, tokens, lower)
            ours = our_losses(args.chorale, first, tokens_file, os.path.join(folder, "losses.npy"), lower)
            apart = np.abs(ours - theirs)
            report[name] = dict(first=[float(ours[0]), float(theirs[0])], last=[last(ours), last(theirs)], largest=float(apart.max()),
                                ours=ours.tolist(), torch=theirs.tolist())
            print(f"{name}: first loss {ours[0]:.6f} (PyTorch {theirs[0]:.6f}), mean of the last {LAST} {last(ours):.5f} ({last(theirs):.5f}), "
                  f"furthest apart {apart.max():.2e} at step {apart.argmax()}", flush=True)
        others = [last(torch_losses(make_model(seed), tokens, True)) for seed in (1, 2)] + [report["bf16"]["last"][1]]
        report["seeds"] = others
    spread = max(others) - min(others)
    apart = {name: abs(report[name]["last"][0] - report[name]["last"][1]) for name in ("f32", "bf16")}
    right = apart["f32"] <= 1e-3 and apart["bf16"] <= spread
    print(f"apart: f32 {apart['f32']:.1e} (1e-3 allowed), bf16 {apart['bf16']:.1e} (seeds spread by {spread:.1e}): {'ok' if right else 'NOT OK'}")
    if args.json:
        with open(args.json, "w") as out:
            json.dump(report, out)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
