// How large a model would be, before it is made. Sizes are real numbers, since what a file asks for may be beyond all
// integers.
#pragma once

#include "chorale/models/bert.h"
#include "chorale/models/gpt2.h"

namespace chorale::models {

struct ModelSize {
  double parameters = 0;  // shared ones once
  double tensors = 0;
};
ModelSize size_of(const Gpt2Config& config);
ModelSize size_of(const BertConfig& config);  // of BertForMaskedLM

// Memory for the parameters as f32, `copies` times (gradients and an optimizer's states are of the same size), with
// what the tensors themselves take.
double bytes_of(const ModelSize& size, double copies = 1);

}  // namespace chorale::models
