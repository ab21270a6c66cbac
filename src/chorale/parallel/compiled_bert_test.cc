// BERT, compiled under data-parallel training: what eager execution gives.
#include <gtest/gtest.h>

#include "chorale/api/compile.h"
#include "chorale/models/bert.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

// Logits, loss, gradients and parameters of one training step of BERT with dropout, eager and compiled, of two copies.
template <class F>
void expect_same_step(models::BertForMaskedLM& eager, models::BertForMaskedLM& other, const Tensor& ids,
                      const F& run_eager, const F& run_compiled) {
  const auto step = [&](const auto& run) {
    manual_seed(1337);
    const Tensor logits = run(ids);
    const Tensor loss = cross_entropy(flatten(logits, 0, 1), flatten(ids));
    backward(loss);
    return std::pair(detach(logits), detach(loss));
  };
  const auto [expected, expected_loss] = step(run_eager);
  const auto [logits, loss] = step(run_compiled);
  // max(|a - b| - 1e-4 |b|) <= 1e-4: a hundred million numbers, one by one, would take too long.
  const NoGrad quiet;
  const auto expect_near = [](const Tensor& a, const Tensor& b, const std::string& what) {
    ASSERT_EQ(a.dtype(), b.dtype());
    EXPECT_LE(amax(sub(abs(sub(a, b)), mul(abs(b), 1e-4))).item<float>(), 1e-4) << what;
  };
  expect_near(logits, expected, "logits");
  expect_near(loss, expected_loss, "loss");
  const auto its = other.named_parameters();
  size_t at = 0;
  for (const auto& [name, parameter] : eager.named_parameters()) {
    const Tensor& copy = its[at++].second;
    EXPECT_FALSE(copy.is(parameter));
    expect_near(copy, parameter, name);
    ASSERT_EQ(gradient(parameter).defined(), gradient(copy).defined()) << name;
    if (gradient(parameter).defined()) expect_near(gradient(copy), gradient(parameter), "gradient of " + name);
  }
}

// All of the base model, in the pieces that its buckets make; a batch of 4 x 512 on demand.
// spec: TestFakeDistributedSingleProc.test_hf_bert_ddp_aot_eager
TEST(FakeDdp, BertGivesWhatEagerGives) {
  manual_seed(1337);
  const bool all = soaking();
  models::BertForMaskedLM eager, other = nn::clone(eager);
  const Tensor ids = randint(0, eager.config.vocab_size, {4, all ? 512 : 8});
  const graph::ActiveDdp module{.cap = graph::bucket_bytes(25), .is_ignored = {}};
  const graph::ActiveDdpScope active(module);
  auto f = compile([&](const Tensor& x) { return other(models::BertInput{x}); });
  const std::function<Tensor(const Tensor&)> run_eager = [&](const Tensor& x) { return eager(models::BertInput{x}); };
  const std::function<Tensor(const Tensor&)> run_compiled = [&](const Tensor& x) { return f(x); };
  expect_same_step(eager, other, ids, run_eager, run_compiled);
  EXPECT_EQ(explain(f).graphs.size(), 14u);
}

void expect_bert_on_two_ranks(bool is_static) {
  run_ranks(2, [is_static](comm::Group& group) {
    const bool all = soaking();
    models::BertConfig config;
    if (!all) {
      config.vocab_size = 3000;
      config.hidden_size = 128;
      config.num_hidden_layers = config.num_attention_heads = 4;
      config.intermediate_size = 512;
    }
    manual_seed(1337);
    DistributedDataParallel eager(models::BertForMaskedLM(config), group, {.static_graph = is_static});
    DistributedDataParallel other(nn::clone(eager.module()), group, {.static_graph = is_static});
    manual_seed(static_cast<uint64_t>(group.rank()));
    const Tensor ids = randint(0, config.vocab_size, {4, all ? 512 : 16});
    auto f = compile([&](const Tensor& x) { return other(models::BertInput{x}); });
    const std::function<Tensor(const Tensor&)> run_eager = [&](const Tensor& x) { return eager(models::BertInput{x}); };
    const std::function<Tensor(const Tensor&)> run_compiled = [&](const Tensor& x) { return f(x); };
    expect_same_step(eager.module(), other.module(), ids, run_eager, run_compiled);
    EXPECT_GE(explain(f).graphs.size(), 2u);
  });
}
// spec: TestMultiProc.test_hf_bert_ddp_aot_eager
TEST(CompiledDdp, BertGivesWhatEagerGives) { expect_bert_on_two_ranks(false); }
// spec: test_hf_bert_ddp_aot_eager_static_graph
TEST(CompiledDdp, BertWithAStaticGraphGivesWhatEagerGives) { expect_bert_on_two_ranks(true); }

}  // namespace
}  // namespace chorale::parallel
