#include "chorale/models/sampling.h"

#include <cmath>

#include "chorale/api/api.h"

namespace chorale::models {

Tensor restrict_logits(const Tensor& logits, const SamplingOptions& options) {
  CHORALE_CHECK(options.temperature > 0, "[sampling] expected a positive temperature, found ", options.temperature);
  CHORALE_CHECK(options.top_k >= 0 && options.top_p > 0 && options.top_p <= 1,
                "[sampling] expected top_k of at least 0 and top_p in (0, 1], found ", options.top_k, " and ",
                options.top_p);
  Tensor x = logits / options.temperature;
  if (options.top_k > 0 && options.top_k < x.size(-1)) {
    const Tensor least = slice(topk(x, options.top_k).values, -1, options.top_k - 1);
    x = masked_fill(x, lt(x, least), -INFINITY);
  }
  if (options.top_p < 1) {
    const ValuesIndices sorted = sort(x, -1, true);
    const Tensor p = softmax(sorted.values, -1);
    // A token stays when those before it have not reached the probability: at least the first one does.
    const Tensor drop = ge(cumsum(p, -1) - p, options.top_p);
    x = scatter(x, -1, sorted.indices, masked_fill(sorted.values, drop, -INFINITY));
  }
  return x;
}

Tensor sample_token(const Tensor& logits, const SamplingOptions& options) {
  CHORALE_CHECK(logits.dims() == 2, "[sample_token] expected logits [batch, vocabulary], found ", logits.sizes());
  if (options.temperature == 0) return argmax(logits, -1);
  Generator& generator = options.generator ? *options.generator : default_generator();
  return select(multinomial(softmax(restrict_logits(logits, options), -1), 1, false, generator), 1, 0);
}

}  // namespace chorale::models
