"""More cases for record_ops.py: shapes, indices, order, linear algebra and neural networks."""
import torch
import torch.nn.functional as F

from ops_oracle import Input

REDUCTIONS = ["none", "mean", "sum"]


def family_index(f):
    x = Input([4, 3, 5], "f64", 1)
    for dtype in ("f32", "i64", "bool", "bf16"):
        f.add("index_select", [Input([4, 3], dtype, 1, 0, 9), Input([3], "i64", values=[2, 0, 2])], lambda a, i: torch.index_select(a, 0, i), {"dim": 0})
    f.add("index_select", [x, Input([3], "i64", values=[2, 0, 2])], lambda a, i: torch.index_select(a, 1, i), {"dim": 1})
    f.add("gather", [x, Input([2, 3, 5], "i64", 2, 0, 4)], lambda a, i: torch.gather(a, 0, i), {"dim": 0})
    f.add("gather", [x, Input([4, 3, 2], "i64", 2, 0, 5)], lambda a, i: torch.gather(a, -1, i), {"dim": -1})
    f.add("scatter_add", [x, Input([2, 3, 5], "i64", 2, 0, 4), Input([2, 3, 5], "f64", 3)], lambda a, i, s: torch.scatter_add(a, 0, i, s), {"dim": 0})
    f.add("scatter", [x, Input([1, 3, 5], "i64", 2, 0, 4), Input([1, 3, 5], "f64", 3)], lambda a, i, s: torch.scatter(a, 0, i, s), {"dim": 0})
    f.add("index_add", [x, Input([3], "i64", values=[1, 1, 0]), Input([4, 3, 5], "f64", 3)], lambda a, i, s: torch.index_add(a, 1, i, s, alpha=2), {"dim": 1, "alpha": 2})
    f.add("take_along_dim", [x, Input([4, 3, 2], "i64", 2, 0, 5)], lambda a, i: torch.take_along_dim(a, i, 2), {"dim": 2})
    f.add("masked_select", [x, Input([4, 3, 5], "bool", 5)], torch.masked_select)
    f.add("nonzero", [Input([3, 4], "bool", 5)], torch.nonzero)
    f.add("index", [x, Input([2, 2], "i64", 2, -4, 4)], lambda a, i: a[i])
    f.add("index2", [x, Input([2, 1], "i64", 2, 0, 4), Input([3], "i64", 3, 0, 3)], lambda a, i, j: a[i, j])
    f.add("index_put", [x, Input([3], "i64", values=[1, 1, 3]), Input([3, 3, 5], "f64", 4)], lambda a, i, v: torch.index_put(a, (i,), v, accumulate=True), {"accumulate": True})
    f.add("embedding", [Input([2, 3], "i64", 2, 0, 6), Input([6, 4], "f64", 1)], lambda i, w: F.embedding(i, w, padding_idx=2), {"padding": 2})
    for mode in ("sum", "mean"):
        f.add("embedding_bag", [Input([7], "i64", 2, 0, 6), Input([6, 4], "f64", 1), Input([3], "i64", values=[0, 3, 3])],
              lambda i, w, o, m=mode: F.embedding_bag(i, w, o, mode=m), {"mode": mode})
    f.add("one_hot", [Input([2, 3], "i64", 2, 0, 5)], lambda i: F.one_hot(i, 5), {"classes": 5})


def family_shape(f):
    x, y = Input([2, 3], "f64", 1), Input([2, 2], "f64", 2)
    f.add("cat", [x, y], lambda a, b: torch.cat([a, b], 1), {"dim": 1})
    f.add("cat", [Input([2, 3], "f32", 1), Input([1, 3], "i64", 2, 0, 9)], lambda a, b: torch.cat([a, b], 0), {"dim": 0})
    f.add("cat", [Input([0]), Input([1, 3])], lambda a, b: torch.cat([a, b], 0), {"dim": 0})
    f.add("stack", [x, Input([2, 3], "f64", 2)], lambda a, b: torch.stack([a, b], -1), {"dim": -1})
    for mode in ("constant", "reflect", "replicate"):
        f.add("pad", [Input([1, 2, 4, 5], "f64", 1)], lambda a, m=mode: F.pad(a, (1, 2, 3, 0), mode=m), {"pads": [1, 2, 3, 0], "mode": mode})
    f.add("pad", [x], lambda a: F.pad(a, (-1, 2), value=7.0), {"pads": [-1, 2], "mode": "constant", "value": 7.0})
    f.add("tile", [x], lambda a: torch.tile(a, (2, 1, 3)), {"repeats": [2, 1, 3]})
    f.add("repeat_interleave", [x], lambda a: torch.repeat_interleave(a, 3, 1), {"repeats": 3, "dim": 1})
    f.add("roll", [x], lambda a: torch.roll(a, (1, -1), (0, 1)), {"shifts": [1, -1], "dims": [0, 1]})
    for k in (-1, 0, 1):
        f.add("tril", [Input([2, 3, 4], "f64", 1)], lambda a, d=k: torch.tril(a, d), {"diagonal": k})
        f.add("triu", [Input([2, 3, 4], "f64", 1)], lambda a, d=k: torch.triu(a, d), {"diagonal": k})
        f.add("diagonal", [Input([2, 3, 4], "f64", 1)], lambda a, d=k: torch.diagonal(a, d, 1, 2), {"offset": k, "dim1": 1, "dim2": 2})
    f.add("unfold", [Input([2, 7], "f64", 1)], lambda a: a.unfold(1, 3, 2), {"dim": 1, "size": 3, "step": 2})
    f.add("flip", [x], lambda a: torch.flip(a, (0, 1)), {"dims": [0, 1]})
    f.add("slice", [Input([7, 2], "f64", 1)], lambda a: a[1:6:2], {"dim": 0, "start": 1, "end": 6, "step": 2})
    f.add("permute", [Input([2, 3, 4], "f64", 1)], lambda a: a.permute(2, 0, 1), {"dims": [2, 0, 1]})
    f.add("expand", [Input([3, 1], "f64", 1)], lambda a: a.expand(2, 3, 4), {"sizes": [2, 3, 4]})


def family_order(f):
    for dtype in ("f32", "f64", "i32", "u8", "bf16"):
        x = Input([3, 7], dtype, 1, 0, 50)
        for descending in (False, True):
            f.add("sort", [x], lambda a, d=descending: tuple(torch.sort(a, dim=1, descending=d, stable=True)), {"dim": 1, "descending": descending})
        f.add("topk", [Input([3, 7], dtype if dtype != "bf16" else "f32", 1, 0, 50 if dtype[0] == "f" else 200)], lambda a: tuple(torch.topk(a, 3, 1)) if a.is_floating_point() else torch.topk(a, 3, 1)[0], {"k": 3, "dim": 1, "values_only": dtype[0] in "iu"})
    f.add("sort", [Input([5], "f32", values=[1, float("nan"), -1, float("inf"), float("-inf")])], lambda a: tuple(torch.sort(a, dim=0, descending=False, stable=True)), {"dim": 0, "descending": False}, grad=False)
    f.add("unique", [Input([12], "i64", 1, 0, 6)], lambda a: torch.unique(a, return_inverse=True, return_counts=True))
    f.add("searchsorted", [Input([5], values=[1.0, 2.0, 2.0, 3.0, 5.0]), Input([4], values=[0.0, 2.0, 4.0, 9.0])], lambda b, v: torch.searchsorted(b, v), {"right": False}, grad=False)
    f.add("searchsorted", [Input([5], values=[1.0, 2.0, 2.0, 3.0, 5.0]), Input([4], values=[0.0, 2.0, 4.0, 9.0])], lambda b, v: torch.searchsorted(b, v, right=True), {"right": True}, grad=False)
    f.add("bincount", [Input([9], "i64", 1, 0, 5)], lambda a: torch.bincount(a, minlength=7), {"minlength": 7})
    spd = lambda a: a @ a.mT + 3 * torch.eye(a.shape[-1], dtype=a.dtype)
    for upper in (False, True):
        f.add("cholesky_of_square", [Input([2, 4, 4], "f64", 1)], lambda a, u=upper: torch.linalg.cholesky(spd(a), upper=u), {"upper": upper})
    for upper, left, unit in [(False, True, False), (True, True, False), (False, False, False), (True, True, True)]:
        f.add("solve_triangular", [Input([2, 3, 3], "f64", 1, 1, 2), Input([2, 3, 3], "f64", 2)],
              lambda a, b, u=upper, l=left, n=unit: torch.linalg.solve_triangular(a, b, upper=u, left=l, unitriangular=n), {"upper": upper, "left": left, "unitriangular": unit})
    f.add("qr_product", [Input([2, 5, 3], "f64", 1)], lambda a: torch.linalg.qr(a)[1].abs(), {})


def family_nn(f):
    for dtype in ("f32", "f64", "bf16"):
        for dim in (0, 1, -1):
            f.add("softmax", [Input([3, 4, 5], dtype, 1)], lambda x, d=dim: torch.softmax(x, d), {"dim": dim})
            f.add("log_softmax", [Input([3, 4, 5], dtype, 1)], lambda x, d=dim: torch.log_softmax(x, d), {"dim": dim})
        f.add("layer_norm", [Input([3, 4, 5], dtype, 1), Input([5], dtype, 2), Input([5], dtype, 3)], lambda x, w, b: F.layer_norm(x, (5,), w, b, 1e-5), {"shape": [5]})
        f.add("rms_norm", [Input([3, 4, 5], dtype, 1), Input([5], dtype, 2)], lambda x, w: F.rms_norm(x, (5,), w, 1e-5), {"shape": [5], "eps": 1e-5})
        f.add("group_norm", [Input([2, 6, 3], dtype, 1), Input([6], dtype, 2), Input([6], dtype, 3)], lambda x, w, b: F.group_norm(x, 3, w, b), {"groups": 3})
    f.add("layer_norm", [Input([3, 4, 5], "f64", 1), None, None], lambda x, w, b: F.layer_norm(x, (4, 5)), {"shape": [4, 5]})
    f.add("instance_norm", [Input([2, 3, 4, 5], "f64", 1)], lambda x: F.instance_norm(x))
    for training in (True, False):
        for shape in ([4, 3], [2, 3, 4], [2, 3, 4, 5]):
            f.add("batch_norm", [Input(shape, "f64", 1), Input([3], "f64", 2, grad=False), Input([3], "f64", 3, 0.5, 2, grad=False), Input([3], "f64", 4), Input([3], "f64", 5)],
                  lambda x, m, v, w, b, t=training: (F.batch_norm(x, m, v, w, b, t, 0.1, 1e-5), m, v), {"training": training})
    for dtype in ("f32", "f64"):
        image = Input([2, 3, 7, 6], dtype, 1)
        for kernel, stride, padding, dilation, ceil in [(2, 2, 0, 1, False), (3, 2, 1, 1, True), (2, 1, 1, 2, False)]:
            args = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "ceil": ceil}
            f.add("max_pool2d", [image], lambda x, k=kernel, s=stride, p=padding, d=dilation, c=ceil: F.max_pool2d(x, k, s, p, d, c), args)
            f.add("max_pool1d", [Input([2, 3, 9], dtype, 1)], lambda x, k=kernel, s=stride, p=padding, d=dilation, c=ceil: F.max_pool1d(x, k, s, p, d, c), args)
            for include in (True, False):
                f.add("avg_pool2d", [image], lambda x, k=kernel, s=stride, p=padding, c=ceil, i=include: F.avg_pool2d(x, k, s, p, c, i), args | {"include": include})
        f.add("adaptive_avg_pool2d", [image], lambda x: F.adaptive_avg_pool2d(x, (3, 4)), {"size": [3, 4]})
        f.add("adaptive_max_pool2d", [image], lambda x: F.adaptive_max_pool2d(x, (3, 4)), {"size": [3, 4]})
        f.add("adaptive_avg_pool1d", [Input([2, 3, 7], dtype, 1)], lambda x: F.adaptive_avg_pool1d(x, 3), {"size": [3]})
        f.add("interpolate", [image], lambda x: F.interpolate(x, size=(5, 9), mode="nearest"), {"size": [5, 9], "mode": "nearest"})
        for corners in (False, True):
            f.add("interpolate", [image], lambda x, c=corners: F.interpolate(x, size=(5, 9), mode="bilinear", align_corners=c), {"size": [5, 9], "mode": "bilinear", "corners": corners})


def family_loss(f):
    logits, classes = Input([6, 5], "f64", 1), Input([6], "i64", 2, 0, 5)
    for reduction in REDUCTIONS:
        for smoothing in (0.0, 0.1):
            f.add("cross_entropy", [logits, classes, None], lambda x, t, w, r=reduction, s=smoothing: F.cross_entropy(x, t, w, reduction=r, label_smoothing=s), {"reduction": reduction, "smoothing": smoothing})
            f.add("cross_entropy", [logits, Input([6], "i64", values=[0, 4, -100, 2, 1, -100]), Input([5], "f64", 3, 0.5, 2, grad=False)],
                  lambda x, t, w, r=reduction, s=smoothing: F.cross_entropy(x, t, w, reduction=r, label_smoothing=s), {"reduction": reduction, "smoothing": smoothing})
        f.add("cross_entropy", [Input([2, 5, 3], "f64", 1), Input([2, 3], "i64", 2, 0, 5), None], lambda x, t, w, r=reduction: F.cross_entropy(x, t, reduction=r), {"reduction": reduction, "smoothing": 0.0})
        f.add("cross_entropy", [logits, Input([6, 5], "f64", 4, 0, 1, grad=False), None], lambda x, t, w, r=reduction: F.cross_entropy(x, t, reduction=r), {"reduction": reduction, "smoothing": 0.0})
        f.add("nll_loss", [logits, classes, None], lambda x, t, w, r=reduction: F.nll_loss(x, t, w, reduction=r), {"reduction": reduction})
        x, y = Input([3, 4], "f64", 1), Input([3, 4], "f64", 2)
        f.add("mse_loss", [x, y], lambda a, b, r=reduction: F.mse_loss(a, b, reduction=r), {"reduction": reduction})
        f.add("l1_loss", [x, y], lambda a, b, r=reduction: F.l1_loss(a, b, reduction=r), {"reduction": reduction})
        f.add("smooth_l1_loss", [x, y], lambda a, b, r=reduction: F.smooth_l1_loss(a, b, reduction=r, beta=0.7), {"reduction": reduction, "beta": 0.7})
        f.add("huber_loss", [x, y], lambda a, b, r=reduction: F.huber_loss(a, b, reduction=r, delta=0.7), {"reduction": reduction, "delta": 0.7})
        f.add("bce", [Input([3, 4], "f64", 1, 0.05, 0.95), Input([3, 4], "f64", 2, 0, 1, grad=False)], lambda a, b, r=reduction: F.binary_cross_entropy(a, b, reduction=r), {"reduction": reduction})
        f.add("bce_with_logits", [x, Input([3, 4], "f64", 2, 0, 1, grad=False), Input([4], "f64", 3, 0.5, 2, grad=False)],
              lambda a, b, p, r=reduction: F.binary_cross_entropy_with_logits(a, b, reduction=r, pos_weight=p), {"reduction": reduction})
    for reduction in REDUCTIONS + ["batchmean"]:
        f.add("kl_div", [Input([3, 4], "f64", 1), Input([3, 4], "f64", 2, 0.1, 1)], lambda a, b, r=reduction: F.kl_div(a, b, reduction=r), {"reduction": reduction, "log_target": False})
        f.add("kl_div", [Input([3, 4], "f64", 1), Input([3, 4], "f64", 2)], lambda a, b, r=reduction: F.kl_div(a, b, reduction=r, log_target=True), {"reduction": reduction, "log_target": True})
    f.add("cosine_similarity", [Input([3, 4], "f64", 1), Input([3, 4], "f64", 2)], lambda a, b: F.cosine_similarity(a, b, 1), {"dim": 1})
    f.add("cross_entropy", [Input([6, 5], "f32", 1), classes, None], lambda x, t, w: F.cross_entropy(x, t), {"reduction": "mean", "smoothing": 0.0})
    f.add("cross_entropy", [Input([64, 1000], "f32", 1), Input([64], "i64", 2, 0, 1000), None], lambda x, t, w: F.cross_entropy(x, t), {"reduction": "mean", "smoothing": 0.0})
    for dtype, tolerance in (("f64", 1e-11), ("f32", 2e-5), ("bf16", None)):
        for causal in (False, True):
            f.add("attention", [Input([2, 2, 5, 4], dtype, 1), Input([2, 2, 5, 4], dtype, 2), Input([2, 2, 5, 4], dtype, 3), None],
                  lambda q, k, v, m, c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c), {"causal": causal, "gqa": False}, tolerance=tolerance)
    f.add("attention", [Input([2, 2, 3, 4], "f64", 1), Input([2, 2, 5, 4], "f64", 2), Input([2, 2, 5, 6], "f64", 3), Input([3, 5], "f64", 4, grad=False)],
          lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), {"causal": False, "gqa": False})
    f.add("attention", [Input([1, 4, 3, 4], "f64", 1), Input([1, 2, 5, 4], "f64", 2), Input([1, 2, 5, 4], "f64", 3), None],
          lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), {"causal": False, "gqa": True})
    f.add("attention", [Input([1, 2, 70, 16], "f32", 1), Input([1, 2, 70, 16], "f32", 2), Input([1, 2, 70, 16], "f32", 3), None],
          lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, is_causal=True), {"causal": True, "gqa": False}, tolerance=2e-5)
