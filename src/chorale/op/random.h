// Random tensors from a counter-based stream: the numbers depend on the generator's seed and place only, not on
// threads.
#pragma once

#include "chorale/base/generator.h"
#include "chorale/op/op_def.h"

namespace chorale {

// Takes a stretch of `words` random words from the generator, as a tiny tensor that random rows take for an input
// (kernel/stretch.h). The same stretch gives the same numbers again: gradients and recomputation save it.
Tensor draw(Generator& generator, int64_t words, Device device = kCpu);

// Numbers in [low, high).
Tensor uniform(const Shape& sizes, double low = 0, double high = 1, DType dtype = DType::kF32,
               Generator& generator = default_generator(), Device device = kCpu);
Tensor normal(const Shape& sizes, double mean = 0, double stddev = 1, DType dtype = DType::kF32,
              Generator& generator = default_generator(), Device device = kCpu);
// Integers in [low, high).
Tensor randint(int64_t low, int64_t high, const Shape& sizes, DType dtype = DType::kI64,
               Generator& generator = default_generator(), Device device = kCpu);
// 0 … n - 1 in random order.
Tensor randperm(int64_t n, DType dtype = DType::kI64, Generator& generator = default_generator(), Device device = kCpu);
// 1 with probability p, else 0; shape and dtype of p.
Tensor bernoulli(const Tensor& p, Generator& generator = default_generator());
// `count` positions drawn from each row of weights, which need not add up to 1.
Tensor multinomial(const Tensor& weights, int64_t count, bool replacement = false,
                   Generator& generator = default_generator());

// Overwrite x; return it.
const Tensor& uniform_(const Tensor& x, double low = 0, double high = 1, Generator& generator = default_generator());
const Tensor& normal_(const Tensor& x, double mean = 0, double stddev = 1, Generator& generator = default_generator());

}  // namespace chorale
