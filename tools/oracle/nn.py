#!/usr/bin/env python3
"""Records what PyTorch's neural-network functions give where their meaning is subtle, for api/nn_oracle_test.cc.

    /path/to/venv/bin/python tools/oracle/nn.py > src/chorale/api/testdata/nn_oracle.inc

Each case is a name and a list of numbers: the results, then the gradients of their weighted sum. The test computes the same
from the same inputs, which both sides make by a formula (op/samples.h).
"""
import torch
import torch.nn.functional as F

from samples import sample, sample_bools, sample_ints


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def record(name, inputs, function, extra=()):
    """`function` of `inputs` (leaves), and gradients of sum(result * weights); `extra` tensors are recorded as they are then."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    results = function(*inputs)
    results = list(results) if isinstance(results, tuple) else [results]
    total = sum((r * sample(*r.shape, seed=77, low=0.5, high=1.5)).sum() for r in results if r.is_floating_point())
    gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    values = []
    for tensor in [*results, *gradients, *extra]:
        if tensor is not None:
            values += tensor.detach().double().flatten().tolist()
    text = ", ".join("kNan" if v != v else f"{v:.10g}" for v in values)
    print(f'    {{"{name}", {{{text}}}}},')


print(f"// Recorded from PyTorch {torch.__version__.split('+')[0]} by tools/oracle/nn.py.")
print("const std::map<std::string, std::vector<double>> kRecorded{")

x23 = sample(2, 3, 4, seed=1)
record("layer_norm", [x23, sample(3, 4, seed=2), sample(3, 4, seed=3)], lambda x, w, b: F.layer_norm(x, (3, 4), w, b))
record("rms_norm", [x23, sample(4, seed=2)], lambda x, w: F.rms_norm(x, (4,), w))
record("group_norm", [sample(2, 4, 3, seed=1), sample(4, seed=2), sample(4, seed=3)], lambda x, w, b: F.group_norm(x, 2, w, b))
running = [sample(3, seed=4), sample(3, seed=5, low=1)]
record("batch_norm", [x23, sample(3, seed=2), sample(3, seed=3)],
       lambda x, w, b: F.batch_norm(x, *running, w, b, training=True, momentum=0.3, eps=0.01), running)
running = [sample(3, seed=4), sample(3, seed=5, low=1)]
record("batch_norm_eval", [x23, sample(3, seed=2), sample(3, seed=3)],
       lambda x, w, b: F.batch_norm(x, *running, w, b, training=False, momentum=0.3, eps=0.01), running)
running = [sample(3, seed=4), sample(3, seed=5, low=1)]
record("instance_norm", [x23, sample(3, seed=2), sample(3, seed=3)],
       lambda x, w, b: F.instance_norm(x, *running, w, b, use_input_stats=True, momentum=0.3, eps=0.01), running)

logits, target, weight = sample(5, 4, seed=1), torch.tensor([3, -100, 0, 1, 3]), sample(4, seed=2, low=0.5)
for reduction in ("none", "mean", "sum"):
    record(f"cross_entropy_{reduction}", [logits],
           lambda x: F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=0.3))
record("cross_entropy_places", [sample(2, 3, 2, 2, seed=1)],
       lambda x: F.cross_entropy(x, sample_ints(2, 2, 2, low=0, high=3, seed=3), weight[:3], ignore_index=1))
record("cross_entropy_soft", [logits, sample(5, 4, seed=3, low=0, high=1)],
       lambda x, t: F.cross_entropy(x, t, weight, label_smoothing=0.2))
record("nll_loss", [logits], lambda x: F.nll_loss(x, target, weight))

# 0 apart, at the bound, beyond it.
apart = [doubles(0, 0, 0, 0, 1), doubles(0, 1, -0.5, 3, -1.5)]
record("l1_loss", apart, lambda x, y: F.l1_loss(x, y, reduction="none"))
record("mse_loss", apart, F.mse_loss)
record("smooth_l1_loss", apart, lambda x, y: F.smooth_l1_loss(x, y, reduction="none"))
record("smooth_l1_loss_half", apart, lambda x, y: F.smooth_l1_loss(x, y, beta=0.5))
record("huber_loss", apart, lambda x, y: F.huber_loss(x, y, reduction="sum"))
record("huber_loss_half", apart, lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.5))
p, t = doubles(0, 1, 0.3, 1e-20, 1), doubles(0, 0, 0.6, 1, 1)
record("binary_cross_entropy", [p], lambda x: F.binary_cross_entropy(x, t, weight=sample(5, seed=3, low=0.5), reduction="none"))
record("binary_cross_entropy_with_logits", [doubles(0, 50, -50, 1.5, -900), t],
       lambda x, y: F.binary_cross_entropy_with_logits(x, y, weight=sample(5, seed=3, low=0.5), pos_weight=sample(5, seed=4, low=0.5)))
kl_target = doubles(0, 0.5, 0.25, 1).reshape(2, 2)
record("kl_div", [sample(2, 2, seed=1)], lambda x: F.kl_div(x, kl_target, reduction="batchmean"))
record("kl_div_log", [sample(2, 2, seed=1), sample(2, 2, seed=2)], lambda x, y: F.kl_div(x, y, log_target=True))
record("cosine_similarity", [sample(3, 4, seed=1), torch.cat([torch.zeros(1, 4).double(), sample(2, 4, seed=2)])],
       lambda x, y: F.cosine_similarity(x, y, dim=1))

image = sample(1, 2, 5, 7, seed=1)
ties = sample_ints(1, 1, 6, 6, low=0, high=3, seed=2).double()
record("max_pool2d", [image], lambda x: F.max_pool2d(x, (3, 2), (2, 3), (1, 1), (1, 2), ceil_mode=True, return_indices=True))
record("max_pool2d_ties", [ties], lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True))
record("max_pool1d", [sample(2, 7, seed=3)], lambda x: F.max_pool1d(x, 3, 2, ceil_mode=True))
record("avg_pool2d", [image], lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True))
record("avg_pool2d_without_padding", [image], lambda x: F.avg_pool2d(x, (2, 4), (2, 3), (1, 2), ceil_mode=True, count_include_pad=False))
record("avg_pool1d", [sample(2, 7, seed=3)], lambda x: F.avg_pool1d(x, 3, 2, 1, ceil_mode=True))
record("adaptive_avg_pool2d", [image], lambda x: F.adaptive_avg_pool2d(x, (3, 4)))
record("adaptive_max_pool2d", [image], lambda x: F.adaptive_max_pool2d(x, (2, 5), return_indices=True))

for size in ((3, 3), (8, 13), (5, 1)):
    record(f"nearest_{size[0]}x{size[1]}", [image], lambda x: F.interpolate(x, size=size, mode="nearest"))
    for corners in (False, True):
        record(f"bilinear_{size[0]}x{size[1]}_{int(corners)}", [image],
               lambda x: F.interpolate(x, size=size, mode="bilinear", align_corners=corners))
record("nearest_scale", [image], lambda x: F.interpolate(x, scale_factor=(1.7, 0.6), mode="nearest"))
record("bilinear_scale", [image], lambda x: F.interpolate(x, scale_factor=(1.7, 0.6), mode="bilinear"))
record("linear_scale", [sample(1, 2, 5, seed=2)], lambda x: F.interpolate(x, scale_factor=2.3, mode="linear"))

qkv = [sample(1, 2, 3, 4, seed=1), sample(1, 2, 5, 4, seed=2), sample(1, 2, 5, 3, seed=3)]
record("attention", qkv, F.scaled_dot_product_attention)
record("attention_causal", qkv, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3))
record("attention_mask", [*qkv, sample(3, 5, seed=4)], lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m))
record("attention_bool", qkv, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, sample_bools(2, 3, 5, seed=6)))
record("attention_grouped", [sample(1, 4, 3, 4, seed=1), *qkv[1:]],
       lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
print("};")
