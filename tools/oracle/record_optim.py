#!/usr/bin/env python3
"""Records what PyTorch's optimizers, schedulers, clipping and gradient scaler do, for optim/oracle_test.cc.

    /path/to/venv/bin/python tools/oracle/record_optim.py > src/chorale/optim/testdata/optim_oracle.inc

Each case is a name and a list of numbers.
  An optimizer: 100 steps on a small network in f64, whose weights and data both sides make by a formula (op/samples.h); the
  loss before every tenth step, then for each parameter its sum weighted by other such numbers (ASGD: also its averages). PyTorch has no LAMB: it is
  written out here from the paper, element by element, without any of our code.
  A scheduler: the learning rate at each step. The scaler: its scale after each update.
"""
import math

import torch
from torch.optim import lr_scheduler as schedulers

from samples import sample

STEPS = 100


class Lamb:
    """You et al., Large Batch Optimization for Deep Learning, algorithm 2, with bias correction, in plain Python."""

    def __init__(self, parameters, lr, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.0, maximize=False):
        self.parameters = parameters
        self.options = lr, beta1, beta2, eps, weight_decay, maximize
        self.m = [[0.0] * p.numel() for p in parameters]
        self.v = [[0.0] * p.numel() for p in parameters]
        self.t = 0

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None

    def step(self):
        lr, beta1, beta2, eps, weight_decay, maximize = self.options
        self.t += 1
        for p, m, v in zip(self.parameters, self.m, self.v):
            weights, gradient = p.detach().flatten().tolist(), p.grad.flatten().tolist()
            steps = []
            for i, (w, g) in enumerate(zip(weights, gradient)):
                g = -g if maximize else g
                m[i] = beta1 * m[i] + (1 - beta1) * g
                v[i] = beta2 * v[i] + (1 - beta2) * g * g
                m_hat, v_hat = m[i] / (1 - beta1**self.t), v[i] / (1 - beta2**self.t)
                steps.append(m_hat / (math.sqrt(v_hat) + eps) + weight_decay * w)
            weight_norm = math.sqrt(sum(w * w for w in weights))
            step_norm = math.sqrt(sum(s * s for s in steps))
            ratio = weight_norm / step_norm if weight_norm > 0 and step_norm > 0 else 1.0
            new = torch.tensor([w - lr * ratio * s for w, s in zip(weights, steps)], dtype=torch.float64)
            with torch.no_grad():
                p.copy_(new.reshape(p.shape))


def adam(cls):
    return lambda p, beta1=0.9, beta2=0.999, **kw: cls(p, betas=(beta1, beta2), foreach=False, **kw)


def plain(cls):
    return lambda p, **kw: cls(p, foreach=False, **kw)


OPTIMIZERS = {
    "sgd": plain(torch.optim.SGD),
    "adam": adam(torch.optim.Adam),
    "adamw": adam(torch.optim.AdamW),
    "adagrad": lambda p, initial_accumulator=0.0, **kw: torch.optim.Adagrad(
        p, initial_accumulator_value=initial_accumulator, foreach=False, **kw),
    "rmsprop": plain(torch.optim.RMSprop),
    "lamb": Lamb,
    "adadelta": plain(torch.optim.Adadelta),
    "adamax": adam(torch.optim.Adamax),
    "nadam": lambda p, decoupled=False, **kw: adam(torch.optim.NAdam)(p, decoupled_weight_decay=decoupled, **kw),
    "radam": lambda p, decoupled=False, **kw: adam(torch.optim.RAdam)(p, decoupled_weight_decay=decoupled, **kw),
    "asgd": plain(torch.optim.ASGD),
    "rprop": lambda p, shrink=0.5, grow=1.2, least_step=1e-6, most_step=50, **kw: torch.optim.Rprop(
        p, etas=(shrink, grow), step_sizes=(least_step, most_step), foreach=False, **kw),
}
CASES = [
    ("sgd", dict(lr=0.05)),
    ("sgd", dict(lr=0.05, momentum=0.9)),
    ("sgd", dict(lr=0.05, momentum=0.8, dampening=0.3)),
    ("sgd", dict(lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1)),
    ("sgd", dict(lr=0.001, momentum=0.5, maximize=True)),
    ("adam", dict(lr=0.01)),
    ("adam", dict(lr=0.02, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.1)),
    ("adam", dict(lr=0.02, amsgrad=True, beta2=0.9)),
    ("adam", dict(lr=0.001, maximize=True)),
    ("adamw", dict(lr=0.01)),
    ("adamw", dict(lr=0.02, weight_decay=0.3, beta1=0.7)),
    ("adamw", dict(lr=0.02, weight_decay=0.0, amsgrad=True, maximize=True)),
    ("adagrad", dict(lr=0.1)),
    ("adagrad", dict(lr=0.1, lr_decay=0.05, weight_decay=0.1, initial_accumulator=0.5, eps=1e-4)),
    ("adagrad", dict(lr=0.01, maximize=True)),
    ("rmsprop", dict(lr=0.01)),
    ("rmsprop", dict(lr=0.01, momentum=0.7, weight_decay=0.1)),
    ("rmsprop", dict(lr=0.01, alpha=0.9, eps=1e-2, centered=True)),
    ("rmsprop", dict(lr=0.005, alpha=0.9, eps=1e-2, centered=True, momentum=0.5, maximize=True)),
    ("lamb", dict(lr=0.01)),
    ("lamb", dict(lr=0.02, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.2)),
    ("lamb", dict(lr=0.005, maximize=True)),
    ("adadelta", dict()),
    ("adadelta", dict(lr=0.5, rho=0.8, eps=1e-3, weight_decay=0.1)),
    ("adadelta", dict(lr=0.1, maximize=True)),
    ("adamax", dict()),
    ("adamax", dict(lr=0.02, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.1)),
    ("adamax", dict(lr=0.001, maximize=True)),
    ("nadam", dict()),
    ("nadam", dict(lr=0.02, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.1, momentum_decay=0.02)),
    ("nadam", dict(lr=0.02, weight_decay=0.1, decoupled=True)),
    ("nadam", dict(lr=0.001, maximize=True)),
    ("radam", dict()),
    ("radam", dict(lr=0.02, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.1)),
    ("radam", dict(lr=0.02, weight_decay=0.1, decoupled=True)),
    ("radam", dict(lr=0.001, maximize=True)),
    ("asgd", dict()),
    ("asgd", dict(lr=0.05, lambd=0.01, alpha=0.6, t0=20, weight_decay=0.1)),
    ("asgd", dict(lr=0.001, maximize=True)),
    ("rprop", dict(lr=0.01)),
    ("rprop", dict(lr=0.02, shrink=0.3, grow=1.5, least_step=1e-3, most_step=0.05)),
    ("rprop", dict(lr=0.001, most_step=0.002, maximize=True)),
]


def train(name, options):
    w1, b1, w2 = (sample(*s, seed=i).requires_grad_() for i, s in ((1, (5, 7)), (2, (7,)), (3, (7, 3))))
    x, y = sample(4, 5, seed=4), sample(4, 3, seed=5)
    optimizer = OPTIMIZERS[name]([w1, b1, w2], **options)
    values = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = ((torch.tanh(x @ w1 + b1) @ w2 - y) ** 2).mean()
        if step % 10 == 0:
            values.append(loss.item())
        loss.backward()
        optimizer.step()
    if name == "asgd":
        values += [(optimizer.state[p]["ax"] * sample(*p.shape, seed=6)).sum().item() for p in (w1, b1, w2)]
    return values + [(p * sample(*p.shape, seed=6)).sum().item() for p in (w1, b1, w2)]


def sparse_adagrad():
    table = sample(6, 3, seed=1).requires_grad_()
    optimizer = torch.optim.Adagrad([table], lr=0.1, lr_decay=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = torch.tensor([step % 5, step * step % 5, 1])
        (torch.nn.functional.embedding(rows, table, sparse=True) ** 2).sum().backward()
        optimizer.step()
    return table.detach().flatten().tolist()


def rates(make, steps, lr=0.3, momentum=False):
    """The learning rate at each step, and after that the momentum at each step."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr, momentum=0.9)
    scheduler = make(optimizer)
    values, momenta = [], []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["momentum"])
        optimizer.step()
        scheduler.step()
    return values + momenta if momentum else values


def warm_cosine(optimizer):
    return schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=4),
         schedulers.CosineAnnealingLR(optimizer, T_max=16, eta_min=0.01)],
        milestones=[4])


SCHEDULES = {
    "step_decay": (lambda o: schedulers.StepLR(o, 3, 0.5), 12),
    "multi_step": (lambda o: schedulers.MultiStepLR(o, [2, 5, 5, 9], 0.3), 12),
    "linear": (lambda o: schedulers.LinearLR(o, 0.25, 0.75, 6), 10),
    "cosine": (lambda o: schedulers.CosineAnnealingLR(o, 15, 0.02), 16),
    "warm_cosine": (warm_cosine, 21),
    "scaled_by": (lambda o: schedulers.LambdaLR(o, lambda t: 1 / (1 + t)), 8),
    "chained": (lambda o: schedulers.ChainedScheduler(
        [schedulers.StepLR(o, 4, 0.5), schedulers.LinearLR(o, 0.2, 1.0, 5)]), 12),
}
CYCLES = {
    "one_cycle": dict(max_lr=0.5, total_steps=20),
    "one_cycle_linear": dict(max_lr=0.5, total_steps=17, pct_start=0.4, anneal_strategy="linear", div_factor=10,
                             final_div_factor=100),
    "one_cycle_three": dict(max_lr=0.5, total_steps=25, pct_start=0.35, three_phase=True, base_momentum=0.7,
                            max_momentum=0.9),
}
METRICS = [5, 4, 4.1, 3.99999, 4, 4, 3.9, 3.9, 3.9, 3.8999, 3.9, 3.9, 3.9, 3.5, 3.6, 3.6, 3.6, 3.6, 3.6, 3.6, 3.6, 3.6]
PLATEAUS = {
    "plateau": dict(patience=2, factor=0.5),
    "plateau_abs": dict(patience=1, factor=0.1, threshold=0.05, threshold_mode="abs", cooldown=2, min_lr=0.005),
    "plateau_max": dict(mode="max", patience=3, factor=0.5, threshold=0.01),
}


def plateau(options):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    scheduler = schedulers.ReduceLROnPlateau(optimizer, **options)
    values = []
    for metric in METRICS:
        scheduler.step(metric)
        values.append(optimizer.param_groups[0]["lr"])
    return values


def scaler():
    """The scale and the weight after each step; gradients of the steps below are infinite or NaN."""
    bad = {3: math.inf, 4: math.nan, 11: -math.inf, 12: math.inf}
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25)
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    values = []
    for step in range(20):
        optimizer.zero_grad()
        scale.scale((weight * 0.5).sum()).backward()
        if step in bad:
            weight.grad[1] = bad[step]
        scale.step(optimizer)
        scale.update()
        values += [scale.get_scale(), weight[0].item()]
    return values


def clipped(norm_type, max_norm):
    leaves = [torch.zeros(4, 3, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)]
    for i, leaf in enumerate(leaves):
        leaf.grad = sample(*leaf.shape, seed=i)
    norm = torch.nn.utils.clip_grad_norm_(leaves, max_norm, norm_type)
    return [norm.item()] + [v for leaf in leaves for v in leaf.grad.flatten().tolist()]


def emit(name, values):
    print(f'    {{"{name}", {{{", ".join(f"{v:.17g}" for v in values)}}}}},')


def main():
    print(f"// Recorded from PyTorch {torch.__version__.split('+')[0]} by tools/oracle/record_optim.py.")
    print("const std::map<std::string, std::vector<double>> kRecorded{")
    seen = {}
    for name, options in CASES:
        seen[name] = seen.get(name, 0) + 1
        emit(f"{name}/{seen[name]}", train(name, options))
    emit("adagrad/sparse", sparse_adagrad())
    for name, (make, steps) in SCHEDULES.items():
        emit(name, rates(make, steps))
    for name, options in CYCLES.items():
        emit(name, rates(lambda o: schedulers.OneCycleLR(o, **options), options["total_steps"], momentum=True))
    for name, options in PLATEAUS.items():
        emit(name, plateau(options))
    emit("scaler", scaler())
    for name, norm_type, max_norm in (("1", 1.0, 2.0), ("2", 2.0, 2.0), ("inf", math.inf, 0.5), ("2_large", 2.0, 100.0),
                                      ("3", 3.0, 2.0), ("half", 0.5, 20.0)):
        emit(f"clip/{name}", clipped(norm_type, max_norm))
    print("};")


if __name__ == "__main__":
    main()
