// Choosing the next token from logits.
#pragma once

#include <functional>
#include <optional>

#include "chorale/base/generator.h"
#include "chorale/tensor/tensor.h"

namespace chorale::models {

struct SamplingOptions {
  double temperature = 0;          // 0: always the likeliest token; 1: as the model says; above: more even
  int64_t top_k = 0;               // only among the k likeliest; 0: all
  double top_p = 1;                // only among the fewest tokens that together have this probability
  Generator* generator = nullptr;  // by default the process's
};
struct GenerateOptions {
  int64_t max_new_tokens = 32;
  std::optional<int64_t> eos_token{};  // ends a sequence, which is filled up with it while others go on
  SamplingOptions sampling{};
  // Called with the tokens [batch] of each place as soon as they are chosen.
  std::function<void(const Tensor& tokens)> on_token{};
};

// Logits [.., vocabulary] divided by the temperature, with -inf for tokens that are not to be chosen.
Tensor restrict_logits(const Tensor& logits, const SamplingOptions& options);
// One token (i64) per row of logits [batch, vocabulary]: [batch].
Tensor sample_token(const Tensor& logits, const SamplingOptions& options);

}  // namespace chorale::models
