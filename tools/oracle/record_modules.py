"""Records what PyTorch's modules compute, as the independent judge of ours.

  python3 tools/oracle/record_modules.py      (PyTorch 2.15; see docs/dev/dependencies.md)

Every case is a module whose parameters, buffers and inputs a formula makes (ops_oracle.Input, in f64): parameter k of
named_parameters() from seed 100 + k in [-0.5, 0.5), floating buffer k from seed 300 + k in [0.5, 1.5), input k from seed k. Recorded are
the outputs, the first and second gradients for weights made by a formula too, and names, shapes and values of parameters and buffers after
the call. Of each tensor a few values and a weighted sum are kept. src/chorale/nn/oracle_test.cc compares without PyTorch being there.
"""
import json
import pathlib

import torch
from torch import nn

from ops_oracle import Input, number

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FEW = 6
torch.set_default_dtype(torch.float64)


def weights(shape, seed):
    return Input(shape, "f64", seed, 0.5, 1.5).tensor()


def brief(t):
    """Shape, a few values, and the sum of all with different weights: a permutation would change it."""
    flat = (torch.zeros(t.shape) + t.detach()).reshape(-1)  # a gradient that is zero may have no memory
    step = max(1, flat.numel() // FEW)
    return {"s": list(t.shape), "step": step, "v": [number(float(f"{v:.13g}")) for v in flat[::step].tolist()],
            "sum": number(float(f"{float((flat * weights(flat.shape, 7)).sum()):.15g}"))}


def tensors_of(value):
    if value is None:
        return []
    return [value] if torch.is_tensor(value) else [t for part in value for t in tensors_of(part)]


def weighted(tensors, seed):
    return sum((t * weights(t.shape, seed + k)).sum() for k, t in enumerate(tensors))


CASES = []


def x(*shape, low=-1.0, high=1.0):
    return lambda seed: Input(shape, "f64", seed, low, high).tensor().requires_grad_()


def ints(*shape, low=0, high=5):
    return lambda seed: Input(shape, "i64", seed, low, high).tensor()


def fixed(values, dtype=torch.float64):
    return lambda seed: torch.tensor(values, dtype=dtype)


def case(name, make, *inputs, call=None, train=True, tolerance=None):
    module = make()
    module.train(train)
    with torch.no_grad():
        for k, (_, p) in enumerate(module.named_parameters()):
            p.copy_(Input(p.shape, "f64", 100 + k, -0.5, 0.5).tensor())
        for k, (_, b) in enumerate(module.named_buffers()):
            if b.dtype.is_floating_point:
                b.copy_(weights(b.shape, 300 + k))
    given = [make_input(k) for k, make_input in enumerate(inputs)]
    outputs = tensors_of((call or (lambda m, *a: m(*a)))(module, *given))
    parameters = dict(module.named_parameters())
    wanted = [t for t in [*given, *parameters.values()] if t.requires_grad]
    entry = {"case": name, "out": [brief(t) for t in outputs]}
    first = torch.autograd.grad(weighted(outputs, 1000), wanted, create_graph=True, allow_unused=True)
    entry["grad"] = [None if g is None else brief(g.to_dense() if g.is_sparse else g) for g in first]
    there = [g for g in first if g is not None and g.requires_grad]
    if there:
        try:
            again = torch.autograd.grad(weighted(there, 2000), wanted, allow_unused=True)
            entry["second"] = [None if g is None else brief(g) for g in again]
            entry["there"] = [i for i, g in enumerate(first) if g is not None and g.requires_grad]
        except RuntimeError as error:
            assert "is not implemented" in str(error), error  # PyTorch has none
    if tolerance:
        entry["tol"] = tolerance
    entry["parameters"] = [[n, list(p.shape)] for n, p in parameters.items()]
    entry["buffers"] = [[n, brief(b)] for n, b in module.named_buffers()]
    CASES.append(entry)


def activations():
    for name in ["ReLU", "Sigmoid", "Tanh", "SiLU", "ReLU6", "Hardsigmoid", "Hardswish", "Mish", "Softsign", "LogSigmoid", "SELU", "GELU",
                 "LeakyReLU", "ELU", "Softplus", "Hardtanh", "PReLU"]:
        case(name, getattr(nn, name), x(3, 5, low=-4, high=4),
             tolerance=1e-7 if name == "Hardsigmoid" else None)  # PyTorch's gradient has 1/6 in f32
    case("GELU_tanh", lambda: nn.GELU("tanh"), x(3, 5, low=-4, high=4))
    case("LeakyReLU_0.3", lambda: nn.LeakyReLU(0.3), x(3, 5))
    case("ELU_0.5", lambda: nn.ELU(0.5), x(3, 5))
    case("Softplus_2_1", lambda: nn.Softplus(2, 1), x(3, 5))
    case("Hardtanh_-0.3_0.6", lambda: nn.Hardtanh(-0.3, 0.6), x(3, 5))
    case("Softmax", lambda: nn.Softmax(1), x(2, 3, 4))
    case("LogSoftmax", lambda: nn.LogSoftmax(-1), x(2, 3, 4))
    case("GLU", lambda: nn.GLU(1), x(2, 4, 3))
    case("PReLU_3", lambda: nn.PReLU(3), x(2, 3, 4))


def linears():
    case("Linear", lambda: nn.Linear(4, 3), x(2, 5, 4))
    case("Linear_no_bias", lambda: nn.Linear(4, 3, bias=False), x(5, 4))
    case("Bilinear", lambda: nn.Bilinear(3, 4, 2), x(5, 3), x(5, 4))
    case("Bilinear_no_bias", lambda: nn.Bilinear(3, 4, 2, bias=False), x(2, 5, 3), x(2, 5, 4))
    case("Embedding", lambda: nn.Embedding(6, 4), ints(2, 5))
    case("Embedding_padding", lambda: nn.Embedding(6, 4, padding_idx=-2), ints(2, 5, high=6))
    case("Embedding_sparse", lambda: nn.Embedding(6, 4, sparse=True), ints(7))
    case("EmbeddingBag_mean", lambda: nn.EmbeddingBag(6, 4), ints(2, 5))
    case("EmbeddingBag_sum_offsets", lambda: nn.EmbeddingBag(6, 4, mode="sum", padding_idx=1), ints(7), fixed([0, 2, 2, 5], torch.int64))
    case("EmbeddingBag_max", lambda: nn.EmbeddingBag(6, 4, mode="max", include_last_offset=True), ints(7), fixed([0, 3, 7], torch.int64))
    case("EmbeddingBag_weighted", lambda: nn.EmbeddingBag(6, 4, mode="sum"), ints(3, 4), x(3, 4), call=lambda m, i, w: m(
        i, per_sample_weights=w))


def convolutions():
    case("Conv1d", lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), x(2, 4, 9))
    case("Conv1d_groups", lambda: nn.Conv1d(4, 6, 3, padding=2, dilation=2, groups=2, bias=False), x(2, 4, 9))
    case("Conv2d", lambda: nn.Conv2d(3, 4, 3, padding=1), x(2, 3, 5, 6))
    case("Conv2d_uneven", lambda: nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2), groups=2), x(2, 2, 7, 6))
    case("Conv2d_no_batch", lambda: nn.Conv2d(3, 4, 2), x(3, 5, 5))
    case("Conv2d_reflect", lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"), x(2, 2, 5, 6))
    case("Conv2d_replicate", lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), x(2, 2, 5, 6))
    case("Conv3d", lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=1), x(1, 2, 4, 5, 3))
    case("ConvTranspose1d", lambda: nn.ConvTranspose1d(4, 3, 3, stride=2, padding=1, output_padding=1), x(2, 4, 5))
    case("ConvTranspose2d", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), x(2, 4, 3, 4))
    case("ConvTranspose2d_dilated", lambda: nn.ConvTranspose2d(2, 3, (2, 3), dilation=2, bias=False), x(1, 2, 3, 4))
    case("ConvTranspose3d", lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), x(1, 2, 2, 3, 2))


def norms():
    case("BatchNorm1d", lambda: nn.BatchNorm1d(3), x(5, 3))
    case("BatchNorm1d_sequence", lambda: nn.BatchNorm1d(3, eps=1e-3, momentum=0.3), x(4, 3, 5))
    case("BatchNorm2d", lambda: nn.BatchNorm2d(3), x(2, 3, 4, 5))
    case("BatchNorm2d_eval", lambda: nn.BatchNorm2d(3), x(2, 3, 4, 5), train=False)
    case("BatchNorm2d_cumulative", lambda: nn.BatchNorm2d(3, momentum=None), x(2, 3, 4, 5), call=lambda m, a: [m(a), m(2 * a)][1])
    case("BatchNorm2d_no_stats", lambda: nn.BatchNorm2d(3, track_running_stats=False), x(2, 3, 4, 5), train=False)
    case("BatchNorm2d_plain", lambda: nn.BatchNorm2d(3, affine=False), x(2, 3, 4, 5))
    case("BatchNorm3d", lambda: nn.BatchNorm3d(2), x(2, 2, 3, 2, 3))
    case("InstanceNorm1d", lambda: nn.InstanceNorm1d(3), x(2, 3, 5))
    case("InstanceNorm2d", lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), x(2, 3, 4, 5))
    case("InstanceNorm2d_eval", lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), x(2, 3, 4, 5), train=False)
    case("InstanceNorm2d_no_batch", lambda: nn.InstanceNorm2d(3), x(3, 4, 5))
    case("InstanceNorm3d", lambda: nn.InstanceNorm3d(2, affine=True), x(2, 2, 3, 2, 3))
    case("LayerNorm", lambda: nn.LayerNorm(6), x(2, 3, 6))
    case("LayerNorm_2", lambda: nn.LayerNorm([3, 4], eps=1e-3), x(2, 3, 4))
    case("LayerNorm_no_bias", lambda: nn.LayerNorm(6, bias=False), x(2, 3, 6))
    case("LayerNorm_plain", lambda: nn.LayerNorm(6, elementwise_affine=False), x(2, 3, 6))
    case("RMSNorm", lambda: nn.RMSNorm(6), x(2, 3, 6))
    case("RMSNorm_eps", lambda: nn.RMSNorm([3, 4], eps=1e-2, elementwise_affine=False), x(2, 3, 4))
    case("GroupNorm", lambda: nn.GroupNorm(2, 6), x(2, 6, 3, 4))
    case("GroupNorm_plain", lambda: nn.GroupNorm(3, 6, eps=1e-3, affine=False), x(2, 6, 5))


def pools():
    case("MaxPool1d", lambda: nn.MaxPool1d(3, stride=2, padding=1), x(2, 3, 9))
    case("MaxPool2d", lambda: nn.MaxPool2d(2), x(2, 3, 6, 5))
    case("MaxPool2d_ceil", lambda: nn.MaxPool2d((3, 2), stride=2, padding=(1, 0), ceil_mode=True), x(2, 3, 6, 5))
    case("AvgPool1d", lambda: nn.AvgPool1d(3, stride=2, padding=1), x(2, 3, 9))
    case("AvgPool2d", lambda: nn.AvgPool2d((2, 3), padding=1, count_include_pad=False), x(2, 3, 6, 5))
    case("AvgPool2d_divisor", lambda: nn.AvgPool2d(2, divisor_override=3, ceil_mode=True), x(2, 3, 5, 5))
    case("AdaptiveAvgPool1d", lambda: nn.AdaptiveAvgPool1d(4), x(2, 3, 9))
    case("AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d((3, 2)), x(2, 3, 5, 7))
    case("Flatten", lambda: nn.Flatten(), x(2, 3, 4))
    case("Dropout_eval", lambda: nn.Dropout(0.5), x(3, 4), train=False)


def recurrents():
    case("RNN", lambda: nn.RNN(3, 4), x(5, 2, 3))
    case("RNN_relu", lambda: nn.RNN(3, 4, nonlinearity="relu", bias=False), x(5, 2, 3), x(1, 2, 4))
    case("RNN_deep", lambda: nn.RNN(3, 4, num_layers=2, bidirectional=True, batch_first=True), x(2, 5, 3), x(4, 2, 4))
    case("GRU", lambda: nn.GRU(3, 4), x(5, 2, 3))
    case("GRU_deep", lambda: nn.GRU(3, 4, num_layers=2, bidirectional=True), x(5, 2, 3), x(4, 2, 4))
    case("GRU_no_batch", lambda: nn.GRU(3, 4, bias=False), x(5, 3), x(1, 4))
    case("LSTM", lambda: nn.LSTM(3, 4), x(5, 2, 3))
    case("LSTM_deep", lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True), x(2, 5, 3), x(4, 2, 4), x(4, 2, 4),
         call=lambda m, a, h, c: m(a, (h, c)))
    case("LSTM_no_batch", lambda: nn.LSTM(3, 4, num_layers=2, bias=False), x(5, 3))


def attentions():
    causal = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    slope = -0.1 * torch.arange(12.).reshape(3, 4)
    case("MultiheadAttention", lambda: nn.MultiheadAttention(6, 2), x(4, 2, 6), call=lambda m, a: m(a, a, a))
    case("MultiheadAttention_fast", lambda: nn.MultiheadAttention(6, 2), x(4, 2, 6),
         call=lambda m, a: m(a, a, a, need_weights=False)[0])
    case("MultiheadAttention_cross", lambda: nn.MultiheadAttention(6, 3, kdim=5, vdim=7, batch_first=True), x(2, 3, 6), x(2, 4, 5),
         x(2, 4, 7), call=lambda m, q, k, v: m(q, k, v, attn_mask=slope, need_weights=False)[0])
    case("MultiheadAttention_masks", lambda: nn.MultiheadAttention(6, 2, bias=False, batch_first=True), x(2, 4, 6),
         call=lambda m, a: m(a, a, a, key_padding_mask=padding, attn_mask=causal))
    case("MultiheadAttention_causal", lambda: nn.MultiheadAttention(6, 2, batch_first=True), x(2, 4, 6),
         call=lambda m, a: m(a, a, a, attn_mask=causal, is_causal=True, need_weights=False)[0])
    case("MultiheadAttention_no_batch", lambda: nn.MultiheadAttention(6, 2), x(3, 6), x(4, 6),
         call=lambda m, q, k: m(q, k, k))
    small = dict(dim_feedforward=10, dropout=0.0)
    case("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(6, 2, **small), x(4, 2, 6))
    case("TransformerEncoderLayer_pre", lambda: nn.TransformerEncoderLayer(6, 2, activation="gelu", norm_first=True, batch_first=True,
                                                                           **small), x(2, 4, 6),
         call=lambda m, a: m(a, src_mask=causal, src_key_padding_mask=padding))
    case("TransformerEncoderLayer_no_bias", lambda: nn.TransformerEncoderLayer(6, 2, bias=False, **small), x(4, 2, 6))
    case("TransformerDecoderLayer", lambda: nn.TransformerDecoderLayer(6, 2, batch_first=True, **small), x(2, 4, 6), x(2, 4, 6),
         call=lambda m, a, b: m(a, b, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding))
    case("TransformerDecoderLayer_pre", lambda: nn.TransformerDecoderLayer(6, 2, norm_first=True, **small), x(4, 2, 6), x(3, 2, 6))


def losses():
    classes = fixed([1, 0, 3, 1], torch.int64)
    signs = fixed([1., -1., 1., -1.])
    case("CrossEntropyLoss", nn.CrossEntropyLoss, x(4, 5), classes)
    case("CrossEntropyLoss_weighted", lambda: nn.CrossEntropyLoss(torch.ones(5), ignore_index=1, label_smoothing=0.1), x(4, 5), classes)
    case("CrossEntropyLoss_none", lambda: nn.CrossEntropyLoss(reduction="none"), x(2, 3, 4), ints(2, 4, high=3))
    case("NLLLoss", lambda: nn.NLLLoss(torch.ones(5), reduction="sum"), x(4, 5), classes)
    case("MSELoss", nn.MSELoss, x(3, 4), x(3, 4))
    case("MSELoss_none", lambda: nn.MSELoss(reduction="none"), x(3, 4), x(3, 4))
    case("L1Loss", lambda: nn.L1Loss(reduction="sum"), x(3, 4), x(3, 4))
    case("SmoothL1Loss", lambda: nn.SmoothL1Loss(beta=0.5), x(3, 4), x(3, 4))
    case("HuberLoss", lambda: nn.HuberLoss(delta=0.5), x(3, 4), x(3, 4))
    case("BCELoss", lambda: nn.BCELoss(torch.ones(4)), x(3, 4, low=0.1, high=0.9), fixed([[0., 1, 1, 0]] * 3))
    case("BCEWithLogitsLoss", lambda: nn.BCEWithLogitsLoss(torch.ones(4), pos_weight=torch.ones(4)), x(3, 4), fixed([[0., 1, 1, 0]] * 3))
    case("KLDivLoss", lambda: nn.KLDivLoss(reduction="batchmean"), x(3, 4), x(3, 4, low=0.1, high=0.9))
    case("KLDivLoss_log", lambda: nn.KLDivLoss(reduction="sum", log_target=True), x(3, 4), x(3, 4))
    case("CosineSimilarity", lambda: nn.CosineSimilarity(-1), x(3, 4), x(3, 4))
    case("CosineEmbeddingLoss", lambda: nn.CosineEmbeddingLoss(0.1), x(4, 5), x(4, 5), signs)
    case("MarginRankingLoss", lambda: nn.MarginRankingLoss(0.2), x(4), x(4), signs)
    case("HingeEmbeddingLoss", lambda: nn.HingeEmbeddingLoss(0.4, reduction="sum"), x(4), signs)
    case("TripletMarginLoss", lambda: nn.TripletMarginLoss(0.7), x(4, 3), x(4, 3), x(4, 3))


if __name__ == "__main__":
    for family in [activations, linears, convolutions, norms, pools, recurrents, attentions, losses]:
        family()
    path = ROOT / "tests" / "oracle" / "modules.json"
    lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in CASES)
    path.write_text(f'{{"torch":"{torch.__version__}","cases":[\n{lines}\n]}}\n')
    print(f"{len(CASES)} cases, {path.stat().st_size / 1024:.0f} KiB")
