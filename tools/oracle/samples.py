"""The numbers of op/samples.h: both sides of a comparison make their inputs by one formula."""
import torch

MASK = 2**64 - 1


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def bits(seed, at):
    return mix((mix(seed & MASK) + at) & MASK)


def numbers(sizes, make, dtype):
    count = 1
    for size in sizes:
        count *= size
    return torch.tensor([make(i) for i in range(count)], dtype=dtype).reshape(sizes)


def sample(*sizes, seed=0, low=-2.0, high=2.0):
    return numbers(sizes, lambda i: low + (high - low) * ((bits(seed, i) >> 11) * 2.0**-53), torch.float64)


def sample_ints(*sizes, low, high, seed=0):
    return numbers(sizes, lambda i: low + bits(seed, i) % (high - low), torch.int64)


def sample_bools(*sizes, seed=0):
    return numbers(sizes, lambda i: bool(bits(seed, i) >> 63), torch.bool)
