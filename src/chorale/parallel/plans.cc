#include "chorale/parallel/plans.h"

#include <string_view>

#include "chorale/base/error.h"

namespace chorale::parallel {
namespace {

// Between blocks activations are copies, or parts along the tokens [batch, tokens, width].
Plan gpt2_plan(const PlanOptions& options) {
  const Placement between = options.sequence_parallel ? shard(1) : replicate();
  const Colwise in = Colwise().with_input(between).keep_sharded();
  const Rowwise out = Rowwise().with_output(between).keep_sharded();
  // The weights of its projections are [in, out].
  Plan plan{{"transformer.wte", out.with_input(replicate())},      {"transformer.wpe", Replicated()},
            {"transformer.h.*.attn.c_attn", in.with_weight(1, 3)}, {"transformer.h.*.attn.c_proj", out.with_weight(1)},
            {"transformer.h.*.mlp.c_fc", in.with_weight(1)},       {"transformer.h.*.mlp.c_proj", out.with_weight(1)}};
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

// Norms come behind the blocks: what a norm gives is read by several layers, and its gradient is reduced there.
Plan bert_plan(const PlanOptions& options) {
  CHORALE_CHECK(!options.sequence_parallel, "[plan_for] there is no plan with sequence parallel for BERT");
  const Colwise in = Colwise().keep_sharded().share_gradient();
  const Rowwise out = Rowwise().keep_sharded();
  Plan plan{{"bert.embeddings.word_embeddings", out.with_input(replicate())},
            {"bert.embeddings.position_embeddings", Replicated()},
            {"bert.embeddings.token_type_embeddings", Replicated()},
            {"bert.embeddings.LayerNorm", Replicated().reduce_gradient()},
            {"bert.encoder.layer.*", Replicated()}};  // the mask, if there is one
  for (const char* layer : {"query", "key", "value"})
    plan.emplace_back(std::string("bert.encoder.layer.*.attention.self.") + layer, in);
  plan.emplace_back("bert.encoder.layer.*.attention.output.dense", out);
  plan.emplace_back("bert.encoder.layer.*.attention.output.LayerNorm", Replicated().reduce_gradient());
  plan.emplace_back("bert.encoder.layer.*.intermediate.dense", in);
  plan.emplace_back("bert.encoder.layer.*.output.dense", out);
  plan.emplace_back("bert.encoder.layer.*.output.LayerNorm", Replicated().reduce_gradient());
  plan.emplace_back("cls.predictions.transform.dense", Replicated());
  plan.emplace_back("cls.predictions.transform.LayerNorm", Replicated());
  plan.emplace_back("cls.predictions.decoder",
                    options.loss_parallel ? Colwise().keep_sharded() : Colwise().with_output(replicate()));
  return plan;
}

}  // namespace

Plan plan_for(const nn::Module& model, const PlanOptions& options) {
  const std::string_view type = model.type_name();
  if (type == "Gpt2") return gpt2_plan(options);
  if (type == "BertForMaskedLM") return bert_plan(options);
  throw InvalidArgument(concat("[plan_for] there are plans for Gpt2 and BertForMaskedLM, not for ", type,
                               ": write one with Colwise, Rowwise and the other styles of tensor_parallel.h"));
}

}  // namespace chorale::parallel
