// BERT, compiled under data-parallel training: what eager execution gives.
#include <gmock/gmock.h>

#include <cstring>

#include "chorale/api/compile.h"
#include "chorale/codegen/fused.h"
#include "chorale/models/bert.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/comm_hooks.h"
#include "chorale/parallel/zoo_test_util.h"
#include "chorale/testing/soak_test_util.h"

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
  // |a - b| <= 1e-4, which is stricter than what is asked for and takes less memory: there are a hundred million
  // numbers.
  const NoGrad quiet;
  const auto expect_near = [](const Tensor& a, const Tensor& b, const std::string& what) {
    ASSERT_EQ(a.dtype(), b.dtype());
    const Tensor difference = sub(a, b);
    EXPECT_LE(amax(difference).item<float>(), 1e-4) << what;
    EXPECT_GE(amin(difference).item<float>(), -1e-4) << what;
  };
  expect_near(logits, expected, "logits");
  expect_near(loss, expected_loss, "loss");
  const auto its = other.named_parameters();
  size_t at = 0;
  for (const auto& [name, parameter] : eager.named_parameters()) {
    const Tensor& copy = its[at++].second;
    EXPECT_FALSE(copy.is(parameter));
    EXPECT_EQ(std::memcmp(copy.raw(), parameter.raw(), copy.storage()->bytes()), 0) << name;
    ASSERT_EQ(gradient(parameter).defined(), gradient(copy).defined()) << name;
    if (gradient(parameter).defined()) expect_near(gradient(copy), gradient(parameter), "gradient of " + name);
  }
}

// Runs BERT in the pieces that its buckets make: as wide as the base model, with a batch of 4 x 512, on demand; else a
// quarter as wide, with a sixteenth of the cap.
void expect_bert_in_pieces(const compiled::Backend& backend) {
  manual_seed(1337);
  const bool all = soaking();
  models::BertConfig config;
  if (!all) {
    config.hidden_size = 192;
    config.intermediate_size = 768;
  }
  models::BertForMaskedLM eager(config), other = nn::clone(eager);
  const Tensor ids = randint(0, config.vocab_size, {4, all ? 512 : 8});
  const graph::ActiveDdp module{.cap = graph::bucket_bytes(all ? 25 : 25.0 / 16), .is_ignored = {}};
  const graph::ActiveDdpScope active(module);
  auto f = compile([&](const Tensor& x) { return other(models::BertInput{x}); }, {.backend = backend});
  const std::function<Tensor(const Tensor&)> run_eager = [&](const Tensor& x) { return eager(models::BertInput{x}); };
  const std::function<Tensor(const Tensor&)> run_compiled = [&](const Tensor& x) { return f(x); };
  expect_same_step(eager, other, ids, run_eager, run_compiled);
  EXPECT_EQ(explain(f).graphs.size(), 14u);
}
// spec: TestFakeDistributedSingleProc.test_hf_bert_ddp_aot_eager
TEST(FakeDdp, BertGivesWhatEagerGives) { expect_bert_in_pieces(compiled::joint_eager()); }
// spec: TestFakeDistributedSingleProc.test_hf_bert_ddp_inductor
TEST(FakeDdp, BertWithGeneratedKernelsGivesWhatEagerGives) { expect_bert_in_pieces(codegen::fused()); }

void expect_bert_on_two_ranks(bool is_static, const compiled::Backend& backend) {
  run_ranks(2, [is_static, &backend](comm::Group& group) {
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
    auto f = compile([&](const Tensor& x) { return other(models::BertInput{x}); }, {.backend = backend});
    const std::function<Tensor(const Tensor&)> run_eager = [&](const Tensor& x) { return eager(models::BertInput{x}); };
    const std::function<Tensor(const Tensor&)> run_compiled = [&](const Tensor& x) { return f(x); };
    expect_same_step(eager.module(), other.module(), ids, run_eager, run_compiled);
    EXPECT_GE(explain(f).graphs.size(), 2u);
  });
}
// spec: TestMultiProc.test_hf_bert_ddp_aot_eager
TEST(CompiledDdp, BertGivesWhatEagerGives) { expect_bert_on_two_ranks(false, compiled::joint_eager()); }
// spec: test_hf_bert_ddp_aot_eager_static_graph
TEST(CompiledDdp, BertWithAStaticGraphGivesWhatEagerGives) { expect_bert_on_two_ranks(true, compiled::joint_eager()); }
// spec: TestMultiProc.test_hf_bert_ddp_inductor
TEST(CompiledDdp, BertWithGeneratedKernelsGivesWhatEagerGives) { expect_bert_on_two_ranks(false, codegen::fused()); }
// spec: test_hf_bert_ddp_inductor_static_graph
TEST(CompiledDdp, BertWithGeneratedKernelsAndAStaticGraphGivesWhatEagerGives) {
  expect_bert_on_two_ranks(true, codegen::fused());
}

// A whole step as one graph, data-parallel: large gradients are sent alone, small ones together.
struct WholeNet : nn::Module {
  Linear first{12, 150}, second{150, 150}, third{150, 7};
  nn::BatchNorm1d norm{150};
  CHORALE_MODULE(WholeNet, first, second, third, norm)
  Tensor forward(const Tensor& x) { return third(relu(norm(second(relu(first(x)))))); }
};

// For equal gradients the averages have the bits of eager data-parallel training, and so has the whole step where the
// graph runs op by op.
TEST(CompiledDdp, AWholeStepHasTheBitsOfAnEagerOne) {
  for (const int size : {1, 2, 3}) {
    run_ranks(size, [](comm::Group& group) {
      WholeNet model = seeded(WholeNet(), 3), other = nn::clone(model);
      DistributedDataParallel eager(model, group), whole(other, group);
      optim::AdamW own(model.named_parameters(), {.lr = 1e-2}), its(other.named_parameters(), {.lr = 1e-2});
      const auto step = [](auto& ddp, optim::Optimizer& optimizer, const Tensor& x, const Tensor& y) {
        optimizer.zero_grad();
        const Tensor loss = cross_entropy(ddp(x), y);
        backward(loss);
        optimizer.step();
        return loss;
      };
      auto compiled =
          compile([&](const Tensor& x, const Tensor& y) { return step(whole, its, x, y); }, {.whole_graph = true});
      for (int i = 0; i < 5; ++i) {
        const Tensor x = pattern({6, 12}, i * 8 + group.rank()), y = Tensor::from<int64_t>({0, 6, 3, 2, 5, 1}, {6});
        EXPECT_EQ(compiled(x, y).item<float>(), step(eager, own, x, y).item<float>()) << i;
      }
      const auto mine = model.named_parameters(), theirs = other.named_parameters();
      for (size_t i = 0; i < mine.size(); ++i) {
        EXPECT_EQ(mine[i].second.to_vector<float>(), theirs[i].second.to_vector<float>()) << mine[i].first;
        EXPECT_EQ(gradient(mine[i].second).to_vector<float>(), gradient(theirs[i].second).to_vector<float>());
      }
      for (size_t i = 0; i < model.named_buffers().size(); ++i) {
        EXPECT_EQ(to(model.named_buffers()[i].second, DType::kF64).to_vector<double>(),
                  to(other.named_buffers()[i].second, DType::kF64).to_vector<double>());
      }
      // The first call makes the optimizer's states, the second is the graph that stays.
      const compiled::Report report = explain(compiled);
      EXPECT_EQ(report.compiles, 2);
      const std::string& text = report.graphs.back().text;
      size_t starts = 0, waits = 0;
      for (size_t at = 0; (at = text.find("collective_start(", at)) != std::string::npos; ++at) ++starts;
      for (size_t at = 0; (at = text.find("collective_wait(", at)) != std::string::npos; ++at) ++waits;
      EXPECT_EQ(starts, 2u) << text;  // the 150 x 150, and all others together
      EXPECT_EQ(waits, 2u);
    });
  }
}

// What a whole graph cannot hold is said, not left out.
TEST(CompiledDdp, AWholeStepRefusesCommunicationHooks) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(WholeNet(), 3), group);
    ddp.register_comm_hook(noop_hook());
    auto f = compile([&](const Tensor& x) { return ddp(x); }, {.whole_graph = true});
    EXPECT_THAT(message_of<StateError>([&] {
                  f(pattern({6, 12}, 1));
                }),
                testing::HasSubstr("a communication hook is no part of"));
  });
}

}  // namespace
}  // namespace chorale::parallel
