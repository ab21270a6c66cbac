// Ready plans of tensor parallel for our own models.
#pragma once

#include "chorale/parallel/tensor_parallel.h"

namespace chorale::parallel {

struct PlanOptions {
  // Activations between blocks are split along the tokens: norms and dropouts run on parts (Megatron's sequence
  // parallel). The same bytes are sent, and less memory is needed.
  bool sequence_parallel = false;
  // The logits stay split along the vocabulary, for loss_parallel().
  bool loss_parallel = false;
};
// For models::Gpt2 and models::BertForMaskedLM (without sequence parallel), by their names of modules; InvalidArgument
// for any other model. Attention is split by heads, and the vocabulary by rows; the results of the model are whole, or
// split as options say.
Plan plan_for(const nn::Module& model, const PlanOptions& options = {});

}  // namespace chorale::parallel
