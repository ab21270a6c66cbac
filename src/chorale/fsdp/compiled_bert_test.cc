// BERT, compiled and fully sharded: rows of spec/compiled-training.md that upstream runs on GPUs, here on two ranks of
// the CPU. Generated kernels, too.
#include "chorale/api/compile.h"
#include "chorale/codegen/fused.h"
#include "chorale/fsdp/fsdp_test_util.h"
#include "chorale/models/bert.h"

namespace chorale::fsdp {
namespace {

// |a - b| <= 1e-4 + 1e-4 |b|, and equal dtypes.
void expect_parity(const Tensor& a, const Tensor& b, const std::string& what) {
  ASSERT_EQ(a.dtype(), b.dtype()) << what;
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i) ASSERT_LE(std::abs(x[i] - y[i]), 1e-4 + 1e-4 * std::abs(y[i])) << what << i;
}

struct Bert : nn::Module {
  models::BertForMaskedLM net;
  bool checkpoints;
  CHORALE_MODULE(Bert, net)
  Bert(const models::BertConfig& config, bool with_checkpoints) : net(config), checkpoints(with_checkpoints) {}
  Tensor forward(const Tensor& ids) {
    if (!checkpoints) return net(models::BertInput{ids});
    Tensor x = net.bert.embeddings(ids, Tensor());
    for (models::BertLayer& layer : net.bert.layers) {
      x = checkpoint([&](const std::vector<Tensor>& in) { return std::vector{layer(in[0], Tensor())}; }, {x})[0];
    }
    return net.head(x);
  }
};

// Logits, loss, gradients and parameters of a step with dropout, of two copies of a model: one as it is and one
// compiled.
void expect_bert(bool by_layer) {
  run_ranks(2, [by_layer](comm::Group& group) {
    models::BertConfig config;
    config.vocab_size = 200;
    config.hidden_size = 32;
    config.num_hidden_layers = config.num_attention_heads = 2;
    config.intermediate_size = 64;
    config.max_position_embeddings = 16;
    manual_seed(1337);
    Bert eager(config, by_layer), other = nn::clone(eager);
    for (Bert* model : {&eager, &other}) {
      if (by_layer) {
        shard_layers_and_root(*model, model->net.bert.layers, {.mesh = line(group)});
      } else {
        fully_shard(*model, {.mesh = line(group)});
      }
    }
    const Tensor tokens = ids({4, 12}, group.rank(), config.vocab_size);
    auto f = compile([&](const Tensor& x) { return other(x); }, {.guard_managed = by_layer});
    const auto step = [&](auto& run) {
      manual_seed(1337);
      const Tensor logits = run(tokens), loss = cross_entropy(flatten(logits, 0, 1), flatten(tokens));
      backward(loss);
      return std::vector{detach(logits), detach(loss)};
    };
    for (int i = 0; i < 2; ++i) {
      const std::vector<Tensor> expected = step(eager), is = step(f);
      expect_parity(is[0], expected[0], "logits");
      expect_parity(is[1], expected[1], "loss");
      const NamedTensors of = eager.named_parameters(), its = other.named_parameters();
      for (size_t p = 0; p < of.size(); ++p) {
        const Tensor &a = of[p].second, &b = its[p].second;
        EXPECT_FALSE(b.is(a));
        expect_parity(full_tensor(b), full_tensor(a), of[p].first);
        ASSERT_EQ(gradient(a).defined(), gradient(b).defined()) << of[p].first;
        if (gradient(a).defined())
          expect_parity(full_tensor(gradient(b)), full_tensor(gradient(a)), "gradient of " + of[p].first);
        set_gradient(a, {});
        set_gradient(b, {});
      }
    }
    EXPECT_GE(explain(f).compiles, by_layer ? 3 : 1);
  });
}

// spec: test_hf_bert_fsdp
TEST(CompiledFullySharded, BertGivesWhatEagerGives) { expect_bert(false); }
// spec: test_hf_bert_fsdp_activation_checkpointing
TEST(CompiledFullySharded, BertWithCheckpointedLayersGivesWhatEagerGives) { expect_bert(true); }

struct FusedToy : nn::Module {
  nn::Linear a{10, 64}, b{64, 64}, c{64, 64}, d{64, 5};
  CHORALE_MODULE(FusedToy, a, b, c, d)
  Tensor forward(const Tensor& x) { return relu(d(relu(c(relu(b(relu(a(x)))))))); }
};

// spec: test_fsdp_inductor
TEST(CompiledFullySharded, GeneratedKernelsGiveWhatEagerGives) {
  run_ranks(2, [](comm::Group& group) {
    FusedToy toy = seeded(FusedToy());
    const Tensor x = pattern({20, 10}, 1), expected = toy(x);
    backward(sum(expected));
    for (const bool each : {false, true}) {
      FusedToy model = nn::clone(toy);
      if (each) {
        for (nn::Linear* linear : {&model.a, &model.b, &model.c, &model.d}) fully_shard(*linear, {.mesh = line(group)});
      }
      fully_shard(model, {.mesh = line(group)});
      auto f = compile([&](const Tensor& in) { return model(in); }, {.backend = codegen::fused()});
      for (int call = 0; call < 2; ++call) expect_parity(f(x), expected, "result");
      backward(sum(f(x)));
      const NamedTensors own = model.named_parameters(), whole = toy.named_parameters();
      for (size_t i = 0; i < own.size(); ++i)
        expect_parity(full_tensor(gradient(own[i].second)), gradient(whole[i].second), own[i].first);
    }
  });
}

}  // namespace
}  // namespace chorale::fsdp
