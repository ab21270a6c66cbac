// Whole training steps of the benchmarks' models, compiled: forward, backward and update in one graph, against the same
// steps op by op.
#include <gtest/gtest.h>

#include <functional>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/base/parallel_for.h"
#include "chorale/codegen/fused.h"
#include "chorale/models/bert.h"
#include "chorale/models/cnn.h"
#include "chorale/models/encoder.h"
#include "chorale/models/gpt2.h"
#include "chorale/models/mlp.h"
#include "chorale/models/resnet.h"
#include "chorale/optim/optim.h"
#include "chorale/testing/soak_test_util.h"

namespace chorale::models {
namespace {

using Use = std::function<void(nn::Module& model, const std::function<Tensor(const Tensor&)>& forward, const Tensor& x,
                               const Tensor& target)>;

// Gives a model with its first parameters and a batch to `use`.
void with_model(const std::string& name, DType dtype, const Use& use) {
  manual_seed(3);
  const bool all = soaking();
  const auto give = [&](auto model, const Tensor& x, const Tensor& target) {
    model.to(dtype);
    use(
        model, [&](const Tensor& in) { return model(in); }, is_floating(x.dtype()) ? to(x, dtype) : x, target);
  };
  if (name == "tinymlp") {
    give(mlp({20, 32, 10}), normal({8, 20}), randint(0, 10, {8}));
  } else if (name == "mlp512x4") {
    const int64_t width = all ? 512 : 96;
    give(mlp({width, width, width, width, width, 10}), normal({32, width}), randint(0, 10, {32}));
  } else if (name == "cnn_fashion") {
    give(fashion_cnn(), normal({all ? 32 : 4, 1, 28, 28}), randint(0, 10, {all ? 32 : 4}));
  } else if (name == "bert_256x4") {
    const EncoderConfig config = all ? EncoderConfig{} : EncoderConfig{300, 64, 2, 4, 16};
    const Tensor ids = randint(0, config.vocabulary, {all ? 8 : 3, config.length});
    give(Encoder(config), ids, flatten(ids));
  } else if (name == "resnet18") {
    give(resnet18(10), normal({2, 3, 32, 32}), randint(0, 10, {2}));
  } else if (name == "bert") {
    BertConfig config;
    config.vocab_size = 200;
    config.hidden_size = config.intermediate_size = 48;
    config.num_hidden_layers = 2;
    config.num_attention_heads = 4;
    const Tensor ids = randint(0, config.vocab_size, {3, 9});
    BertForMaskedLM bert(config);
    bert.to(dtype);
    use(
        bert, [&](const Tensor& in) { return bert(BertInput{in}); }, ids, flatten(ids));
  } else if (name == "gpt2") {
    const Gpt2Config config{.vocab_size = 200, .n_positions = 16, .n_embd = 48, .n_layer = 2, .n_head = 4};
    const Tensor ids = randint(0, config.vocab_size, {3, 9});
    give(Gpt2(config), ids, flatten(ids));
  }
}

struct Trained {
  std::vector<std::vector<double>> losses_and_parameters;
  int compiles = 0;
};

Trained train(const std::string& name, DType dtype, bool sgd, const CompileOptions* options) {
  Trained trained;
  with_model(name, dtype, [&](nn::Module& model, const auto& forward, const Tensor& x, const Tensor& target) {
    std::unique_ptr<optim::Optimizer> optimizer;
    if (sgd) {
      optimizer =
          std::make_unique<optim::Sgd>(model.named_parameters(), optim::SgdOptions{.lr = 0.05, .momentum = 0.9});
    } else {
      optimizer = std::make_unique<optim::AdamW>(model.named_parameters(), optim::AdamWOptions{.lr = 1e-3});
    }
    const auto step = [&](const Tensor& in, const Tensor& wanted) {
      optimizer->zero_grad();
      const Tensor y = dropout(forward(in), 0.1);
      const Tensor loss = cross_entropy(y.dims() > 2 ? flatten(y, 0, -2) : y, wanted);
      backward(loss);
      optimizer->step();
      return loss;
    };
    auto compiled = compile(step, options ? *options : CompileOptions{});
    manual_seed(17);
    std::vector<double> losses;
    losses.reserve(20);
    for (int i = 0; i < 20; ++i) {
      losses.push_back(to(options ? compiled(x, target) : step(x, target), DType::kF64).template item<double>());
    }
    trained.compiles = explain(compiled).compiles;
    trained.losses_and_parameters.push_back(std::move(losses));
    for (const auto& [at, parameter] : model.named_parameters()) {
      trained.losses_and_parameters.push_back(to(parameter, DType::kF64).template to_vector<double>());
    }
  });
  return trained;
}

void expect_close(const Trained& is, const Trained& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(is.losses_and_parameters.size(), expected.losses_and_parameters.size());
  for (size_t k = 0; k < is.losses_and_parameters.size(); ++k) {
    const std::vector<double>&a = is.losses_and_parameters[k], &b = expected.losses_and_parameters[k];
    ASSERT_EQ(a.size(), b.size());
    size_t i = 0;  // not one assertion each: there are millions
    while (i < a.size() && std::abs(a[i] - b[i]) <= tolerance * (1 + std::abs(b[i]))) ++i;
    ASSERT_EQ(i, a.size()) << what << ", " << k << ": " << a[i] << ", expected " << b[i];
  }
}

class CompiledModels : public testing::TestWithParam<const char*> {};

TEST_P(CompiledModels, TrainAsOpByOp) {
  set_thread_count(1);
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const double tolerance = dtype == DType::kF64 ? 1e-9 : 1e-4;
    for (const bool sgd : {true, false}) {
      if (!sgd && dtype == DType::kF64) continue;
      // Eleven million parameters: once is enough.
      if (GetParam() == std::string("resnet18") && (!sgd || dtype == DType::kF64)) continue;
      const Trained eager = train(GetParam(), dtype, sgd, nullptr);
      const CompileOptions fused{.whole_graph = true, .backend = codegen::fused({.optimize = "-O1"})},
          op_by_op{.whole_graph = true};
      const Trained joint = train(GetParam(), dtype, sgd, &op_by_op), whole = train(GetParam(), dtype, sgd, &fused);
      const std::string what = std::string(name_of(dtype)) + (sgd ? " sgd" : " adamw");
      expect_close(joint, eager, 0, what + ", joint");
      expect_close(whole, eager, tolerance, what + ", fused");
      EXPECT_LE(whole.compiles, 2);
      // The same with dropout inside, and with everything computed again that may be.
      if (dtype == DType::kF32 && (GetParam() == std::string("bert") || GetParam() == std::string("gpt2"))) {
        const CompileOptions lean{.whole_graph = true, .memory_budget = 0};
        expect_close(train(GetParam(), dtype, sgd, &lean), eager, 0, what + ", with little memory");
      }
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Benchmarks, CompiledModels,
                         testing::Values("tinymlp", "mlp512x4", "cnn_fashion", "bert_256x4", "resnet18", "bert",
                                         "gpt2"),
                         [](const auto& row) { return std::string(row.param); });

}  // namespace
}  // namespace chorale::models
