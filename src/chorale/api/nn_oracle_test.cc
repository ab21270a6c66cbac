// Neural-network functions against values and gradients recorded from PyTorch, where their meaning is subtle: edges,
// ties, empty windows, running statistics. Inputs come from the formulas of op/samples.h on both sides.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "chorale/autograd/autograd.h"
#include "chorale/op/copy.h"
#include "chorale/op/functions.h"
#include "chorale/op/samples.h"

namespace chorale {
namespace {

#include "chorale/api/testdata/nn_oracle.inc"

using op::sample;
using op::sample_bools;
using op::sample_ints;
using Function = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;

// Results of `function`, gradients of their weighted sum with respect to `inputs`, then `extra`.
void expect_recorded(const std::string& name, const std::vector<Tensor>& inputs, const Function& function,
                     const std::vector<Tensor>& extra = {}) {
  ASSERT_TRUE(kRecorded.contains(name)) << name;
  const std::vector<double>& expected = kRecorded.at(name);
  std::vector<Tensor> leaves;
  leaves.reserve(inputs.size());
  for (const Tensor& x : inputs) leaves.push_back(set_requires_grad(clone(x)));
  std::vector<Tensor> all = function(leaves);
  Tensor total;
  for (const Tensor& y : all) {
    if (!is_floating(y.dtype())) continue;
    const Tensor part = sum(y * sample(y.sizes(), 77, 0.5, 1.5));
    total = total.defined() ? total + part : part;
  }
  for (const Tensor& gradient : grad({total}, leaves)) all.push_back(gradient);
  all.insert(all.end(), extra.begin(), extra.end());
  std::vector<double> values;
  for (const Tensor& x : all) {
    for (double value : x.to_vector<double>()) values.push_back(value);
  }
  ASSERT_EQ(values.size(), expected.size()) << name;
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i]) && std::isnan(expected[i])) continue;
    EXPECT_NEAR(values[i], expected[i], 1e-8 * (1 + std::abs(expected[i]))) << name << ", number " << i;
  }
}

Tensor numbers(std::initializer_list<double> values, const Shape& sizes) { return Tensor::from<double>(values, sizes); }

TEST(NnOracle, Normalisation) {
  const Tensor x = sample({2, 3, 4}, 1);
  expect_recorded("layer_norm", {x, sample({3, 4}, 2), sample({3, 4}, 3)}, [](const auto& in) {
    return std::vector{layer_norm(in[0], {3, 4}, in[1], in[2])};
  });
  expect_recorded("rms_norm", {x, sample({4}, 2)},
                  [](const auto& in) { return std::vector{rms_norm(in[0], 4, in[1])}; });
  expect_recorded("group_norm", {sample({2, 4, 3}, 1), sample({4}, 2), sample({4}, 3)},
                  [](const auto& in) { return std::vector{group_norm(in[0], 2, in[1], in[2])}; });
  for (bool training : {true, false}) {
    const std::vector<Tensor> running{sample({3}, 4), sample({3}, 5, 1, 2)};
    expect_recorded(
        training ? "batch_norm" : "batch_norm_eval", {x, sample({3}, 2), sample({3}, 3)},
        [&](const auto& in) {
          return std::vector{batch_norm(in[0], running[0], running[1], in[1], in[2], training, 0.3, 0.01)};
        },
        running);
  }
  const std::vector<Tensor> running{sample({3}, 4), sample({3}, 5, 1, 2)};
  expect_recorded(
      "instance_norm", {x, sample({3}, 2), sample({3}, 3)},
      [&](const auto& in) {
        return std::vector{instance_norm(in[0], running[0], running[1], in[1], in[2], true, 0.3, 0.01)};
      },
      running);
}

TEST(NnOracle, LossesOfClasses) {
  const Tensor logits = sample({5, 4}, 1), target = Tensor::from<int64_t>({3, -100, 0, 1, 3}, {5}),
               weight = sample({4}, 2, 0.5, 2);
  const std::pair<const char*, Reduction> reductions[] = {{"cross_entropy_none", Reduction::kNone},
                                                          {"cross_entropy_mean", Reduction::kMean},
                                                          {"cross_entropy_sum", Reduction::kSum}};
  for (const auto& [name, reduction] : reductions) {
    expect_recorded(name, {logits}, [&, r = reduction](const auto& in) {
      return std::vector{cross_entropy(in[0], target, weight, r, -100, 0.3)};
    });
  }
  expect_recorded("cross_entropy_places", {sample({2, 3, 2, 2}, 1)}, [&](const auto& in) {
    return std::vector{
        cross_entropy(in[0], sample_ints({2, 2, 2}, 0, 3, 3), narrow(weight, 0, 0, 3), Reduction::kMean, 1)};
  });
  expect_recorded("cross_entropy_soft", {logits, sample({5, 4}, 3, 0, 1)}, [&](const auto& in) {
    return std::vector{cross_entropy(in[0], in[1], weight, Reduction::kMean, -100, 0.2)};
  });
  expect_recorded("nll_loss", {logits}, [&](const auto& in) { return std::vector{nll_loss(in[0], target, weight)}; });
}

TEST(NnOracle, LossesOfNumbers) {
  const std::vector<Tensor> apart{numbers({0, 0, 0, 0, 1}, {5}), numbers({0, 1, -0.5, 3, -1.5}, {5})};
  const auto loss = [&](const char* name, auto&& function) {
    expect_recorded(name, apart, [&](const auto& in) { return std::vector{function(in[0], in[1])}; });
  };
  loss("l1_loss", [](const Tensor& x, const Tensor& y) { return l1_loss(x, y, Reduction::kNone); });
  loss("mse_loss", [](const Tensor& x, const Tensor& y) { return mse_loss(x, y); });
  loss("smooth_l1_loss", [](const Tensor& x, const Tensor& y) { return smooth_l1_loss(x, y, Reduction::kNone); });
  loss("smooth_l1_loss_half",
       [](const Tensor& x, const Tensor& y) { return smooth_l1_loss(x, y, Reduction::kMean, 0.5); });
  loss("huber_loss", [](const Tensor& x, const Tensor& y) { return huber_loss(x, y, Reduction::kSum); });
  loss("huber_loss_half", [](const Tensor& x, const Tensor& y) { return huber_loss(x, y, Reduction::kNone, 0.5); });

  const Tensor p = numbers({0, 1, 0.3, 1e-20, 1}, {5}), t = numbers({0, 0, 0.6, 1, 1}, {5}),
               weight = sample({5}, 3, 0.5, 2);
  expect_recorded("binary_cross_entropy", {p}, [&](const auto& in) {
    return std::vector{binary_cross_entropy(in[0], t, weight, Reduction::kNone)};
  });
  expect_recorded("binary_cross_entropy_with_logits", {numbers({0, 50, -50, 1.5, -900}, {5}), t}, [&](const auto& in) {
    return std::vector{
        binary_cross_entropy_with_logits(in[0], in[1], weight, Reduction::kMean, sample({5}, 4, 0.5, 2))};
  });
  expect_recorded("kl_div", {sample({2, 2}, 1)}, [](const auto& in) {
    return std::vector{kl_div(in[0], numbers({0, 0.5, 0.25, 1}, {2, 2}), KlReduction::kBatchMean)};
  });
  expect_recorded("kl_div_log", {sample({2, 2}, 1), sample({2, 2}, 2)},
                  [](const auto& in) { return std::vector{kl_div(in[0], in[1], KlReduction::kMean, true)}; });
  const Tensor half_zero = cat({zeros({1, 4}, DType::kF64), sample({2, 4}, 2)});
  expect_recorded("cosine_similarity", {sample({3, 4}, 1), half_zero},
                  [](const auto& in) { return std::vector{cosine_similarity(in[0], in[1])}; });
}

TEST(NnOracle, Pooling) {
  const Tensor image = sample({1, 2, 5, 7}, 1), row = sample({2, 7}, 3);
  const auto both = [](const ValuesIndices& result) { return std::vector{result.values, result.indices}; };
  expect_recorded("max_pool2d", {image}, [&](const auto& in) {
    return both(max_pool2d_with_indices(in[0], {3, 2}, {2, 3}, {1, 1}, {1, 2}, true));
  });
  expect_recorded("max_pool2d_ties", {to(sample_ints({1, 1, 6, 6}, 0, 3, 2), DType::kF64)},
                  [&](const auto& in) { return both(max_pool2d_with_indices(in[0], 3, 2, 1)); });
  expect_recorded("max_pool1d", {row}, [](const auto& in) { return std::vector{max_pool1d(in[0], 3, 2, 0, 1, true)}; });
  expect_recorded("avg_pool2d", {image}, [](const auto& in) { return std::vector{avg_pool2d(in[0], 3, 2, 1, true)}; });
  expect_recorded("avg_pool2d_without_padding", {image}, [](const auto& in) {
    return std::vector{avg_pool2d(in[0], {2, 4}, {2, 3}, {1, 2}, true, false)};
  });
  expect_recorded("avg_pool1d", {row}, [](const auto& in) { return std::vector{avg_pool1d(in[0], 3, 2, 1, true)}; });
  expect_recorded("adaptive_avg_pool2d", {image}, [](const auto& in) {
    return std::vector{adaptive_avg_pool2d(in[0], {3, 4})};
  });
  expect_recorded("adaptive_max_pool2d", {image}, [&](const auto& in) {
    return both(adaptive_max_pool2d_with_indices(in[0], {2, 5}));
  });
}

TEST(NnOracle, Interpolation) {
  const Tensor image = sample({1, 2, 5, 7}, 1);
  const auto resize = [](const std::string& name, const Tensor& x, const InterpolateOptions& options) {
    expect_recorded(name, {x}, [&](const auto& in) { return std::vector{interpolate(in[0], options)}; });
  };
  for (const auto& [height, width] : {std::pair<int64_t, int64_t>{3, 3}, {8, 13}, {5, 1}}) {
    const std::string size = std::to_string(height) + "x" + std::to_string(width);
    resize("nearest_" + size, image, {.size = {height, width}});
    for (bool corners : {false, true}) {
      resize("bilinear_" + size + (corners ? "_1" : "_0"), image,
             {.size = {height, width}, .mode = Interpolation::kLinear, .align_corners = corners});
    }
  }
  resize("nearest_scale", image, {.scale_factor = {1.7, 0.6}});
  resize("bilinear_scale", image, {.scale_factor = {1.7, 0.6}, .mode = Interpolation::kLinear});
  resize("linear_scale", sample({1, 2, 5}, 2), {.scale_factor = {2.3}, .mode = Interpolation::kLinear});
}

TEST(NnOracle, Attention) {
  const std::vector<Tensor> qkv{sample({1, 2, 3, 4}, 1), sample({1, 2, 5, 4}, 2), sample({1, 2, 5, 3}, 3)};
  const auto attend = [](const std::string& name, const std::vector<Tensor>& inputs, AttentionOptions options) {
    expect_recorded(name, inputs, [&](const auto& in) {
      if (in.size() > 3) options.mask = in[3];
      return std::vector{scaled_dot_product_attention(in[0], in[1], in[2], options)};
    });
  };
  attend("attention", qkv, {});
  attend("attention_causal", qkv, {.is_causal = true, .scale = 0.3});
  attend("attention_mask", {qkv[0], qkv[1], qkv[2], sample({3, 5}, 4)}, {});
  attend("attention_bool", qkv, {.mask = sample_bools({2, 3, 5}, 6)});
  attend("attention_grouped", {sample({1, 4, 3, 4}, 1), qkv[1], qkv[2]}, {.enable_gqa = true});
}

}  // namespace
}  // namespace chorale
