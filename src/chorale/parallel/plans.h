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
// For models::Gpt2, BertForMaskedLM and Encoder it follows their names of modules: attention is split by heads, and the
// vocabulary by rows. For a Sequential such as models::mlp() it takes the Linear layers in pairs, of which the first is
// split by outputs and the second by inputs; a last one without a partner stays whole, and options change nothing.
// InvalidArgument for any other model. The results of the model are whole, or split as options say.
Plan plan_for(nn::Module& model, const PlanOptions& options = {});

}  // namespace chorale::parallel
