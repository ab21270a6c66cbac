#include "chorale/parallel/plans.h"

#include <string_view>

#include "chorale/base/error.h"
#include "chorale/nn/linear.h"

namespace chorale::parallel {
namespace {

// Between blocks activations are copies, or parts along the tokens [batch, tokens, width].
Plan gpt2_plan(const PlanOptions& options) {
  const Placement between = options.sequence_parallel ? shard(1) : replicate();
  const Colwise in = Colwise().with_input(between).keep_sharded();
  const Rowwise out = Rowwise().with_output(between).keep_sharded();
  // Its projections say that their weights are [in, out], and that c_attn is three layers.
  Plan plan{{"transformer.wte", out.with_input(replicate())},
            {"transformer.wpe", Replicated()},
            {"transformer.h.*.attn.c_attn", in},
            {"transformer.h.*.attn.c_proj", out},
            {"transformer.h.*.mlp.c_fc", in},
            {"transformer.h.*.mlp.c_proj", out}};
  for (const char* norm : {"transformer.h.*.ln_1", "transformer.h.*.ln_2", "transformer.ln_f"}) {
    if (options.sequence_parallel) {
      plan.emplace_back(norm, SequenceParallel(1));
    } else {
      plan.emplace_back(norm, Replicated());
    }
  }
  const Colwise head = Colwise().with_input(between);
  plan.emplace_back("lm_head", options.loss_parallel ? head.keep_sharded() : head.with_output(replicate()));
  return plan;
}

// Norms come behind the blocks. What a norm gives is read by several layers: where it is a copy, its gradient is
// reduced there, and where it is split along the tokens, attention gathers it once for its three layers.
Plan bert_plan(const PlanOptions& options) {
  const bool sequence = options.sequence_parallel;
  const Placement between = sequence ? shard(1) : replicate();
  const Colwise in = Colwise().keep_sharded().share_gradient();
  const Rowwise out = Rowwise().with_output(between).keep_sharded();
  const std::string layer = "bert.encoder.layer.*";
  Plan plan{{"bert.embeddings.word_embeddings", out.with_input(replicate())},
            {"bert.embeddings.position_embeddings", Replicated()},
            {"bert.embeddings.token_type_embeddings", Replicated()},
            {layer, Replicated()}};  // the mask, if there is one
  if (sequence) plan.emplace_back(layer + ".attention.self", PrepareInput({shard(1)}, {replicate()}));
  for (const char* part : {"query", "key", "value"}) plan.emplace_back(layer + ".attention.self." + part, in);
  plan.emplace_back(layer + ".attention.output.dense", out);
  plan.emplace_back(layer + ".intermediate.dense", sequence ? Colwise().with_input(between).keep_sharded() : in);
  plan.emplace_back(layer + ".output.dense", out);
  for (const std::string& norm :
       {std::string("bert.embeddings.LayerNorm"), layer + ".attention.output.LayerNorm", layer + ".output.LayerNorm"}) {
    if (sequence) {
      plan.emplace_back(norm, SequenceParallel(1));
    } else {
      plan.emplace_back(norm, Replicated().reduce_gradient());
    }
  }
  // Few numbers for each token: every rank has the weights, and with sequence parallel its own tokens.
  plan.emplace_back("cls.predictions.transform.dense", Replicated());
  plan.emplace_back("cls.predictions.transform.LayerNorm", Replicated());
  const Colwise head = Colwise().with_input(between);
  plan.emplace_back("cls.predictions.decoder",
                    options.loss_parallel ? head.keep_sharded() : head.with_output(replicate()));
  return plan;
}

// Queries, keys and values are one layer, which is split by heads.
Plan encoder_plan(const PlanOptions& options) {
  const Placement between = options.sequence_parallel ? shard(1) : replicate();
  const Colwise in = Colwise().with_input(between).keep_sharded();
  const Rowwise out = Rowwise().with_output(between).keep_sharded();
  Plan plan{{"token", out.with_input(replicate())},
            {"position", Replicated()},
            {"blocks.*.qkv", in.with_weight(0, 3)},
            {"blocks.*.out", out},
            {"blocks.*.up", in},
            {"blocks.*.down", out}};
  for (const char* norm : {"blocks.*.ln1", "blocks.*.ln2", "ln"}) {
    if (options.sequence_parallel) {
      plan.emplace_back(norm, SequenceParallel(1));
    } else {
      plan.emplace_back(norm, Replicated());
    }
  }
  const Colwise head = Colwise().with_input(between);
  plan.emplace_back("head", options.loss_parallel ? head.keep_sharded() : head.with_output(replicate()));
  return plan;
}

// What is between two layers of a pair runs on parts; a pair ends with an ordinary tensor.
Plan sequential_plan(nn::Module& model) {
  std::vector<std::string> layers;
  for (const auto& [path, part] : model.named_modules()) {
    if (dynamic_cast<nn::Linear*>(part)) layers.push_back(path);
  }
  CHORALE_CHECK(layers.size() >= 2, "[plan_for] a Sequential with ", layers.size(),
                " Linear layers has no pair that could be split: write a plan with Colwise and Rowwise");
  Plan plan;
  for (size_t i = 0; i + 1 < layers.size(); i += 2) {
    plan.emplace_back(layers[i], Colwise().keep_sharded());
    plan.emplace_back(layers[i + 1], Rowwise());
  }
  return plan;
}

}  // namespace

Plan plan_for(nn::Module& model, const PlanOptions& options) {
  const std::string_view type = model.type_name();
  if (type == "Gpt2") return gpt2_plan(options);
  if (type == "BertForMaskedLM") return bert_plan(options);
  if (type == "Encoder") return encoder_plan(options);
  if (type == "Sequential") return sequential_plan(model);
  throw InvalidArgument(concat("[plan_for] there are plans for Gpt2, BertForMaskedLM, Encoder and Sequential, not for ",
                               type, ": write one with Colwise, Rowwise and the other styles of tensor_parallel.h"));
}

}  // namespace chorale::parallel
