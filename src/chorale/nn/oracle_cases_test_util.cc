#include "chorale/nn/oracle_cases_test_util.h"

#include "chorale/nn/nn.h"
#include "chorale/op/samples.h"

namespace chorale::nn::oracle {

Input x(const Shape& sizes, double low, double high) {
  return {[=](int seed) {
    const Tensor value = op::sample(sizes, seed, low, high);
    return set_requires_grad(value);
  }};
}
Input ints(const Shape& sizes, int64_t low, int64_t high) {
  return {[=](int seed) { return op::sample_ints(sizes, low, high, seed); }};
}
Input fixed(const Tensor& value) {
  return {[=](int) { return value; }};
}

namespace {

template <class M>
std::function<Case()> activation(double bound = 4) {
  return CHORALE_CASE(M(), {x({3, 5}, -bound, bound)});
}

void add_activations(Cases& cases) {
  cases["ReLU"] = activation<ReLU>();
  cases["Sigmoid"] = activation<Sigmoid>();
  cases["Tanh"] = activation<Tanh>();
  cases["SiLU"] = activation<SiLU>();
  cases["ReLU6"] = activation<ReLU6>();
  cases["Hardsigmoid"] = activation<Hardsigmoid>();
  cases["Hardswish"] = activation<Hardswish>();
  cases["Mish"] = activation<Mish>();
  cases["Softsign"] = activation<Softsign>();
  cases["LogSigmoid"] = activation<LogSigmoid>();
  cases["SELU"] = activation<SELU>();
  cases["GELU"] = activation<GELU>();
  cases["LeakyReLU"] = activation<LeakyReLU>();
  cases["ELU"] = activation<ELU>();
  cases["Softplus"] = activation<Softplus>();
  cases["Hardtanh"] = activation<Hardtanh>();
  cases["PReLU"] = activation<PReLU>();
  cases["GELU_tanh"] = CHORALE_CASE(GELU(Gelu::kTanh), {x({3, 5}, -4, 4)});
  cases["LeakyReLU_0.3"] = CHORALE_CASE(LeakyReLU(0.3), {x({3, 5})});
  cases["ELU_0.5"] = CHORALE_CASE(ELU(0.5), {x({3, 5})});
  cases["Softplus_2_1"] = CHORALE_CASE(Softplus(2, 1), {x({3, 5})});
  cases["Hardtanh_-0.3_0.6"] = CHORALE_CASE(Hardtanh(-0.3, 0.6), {x({3, 5})});
  cases["Softmax"] = CHORALE_CASE(Softmax(1), {x({2, 3, 4})});
  cases["LogSoftmax"] = CHORALE_CASE(LogSoftmax(-1), {x({2, 3, 4})});
  cases["GLU"] = CHORALE_CASE(GLU(1), {x({2, 4, 3})});
  cases["PReLU_3"] = CHORALE_CASE(PReLU(3), {x({2, 3, 4})});
}

void add_linears(Cases& cases) {
  cases["Linear"] = CHORALE_CASE(Linear(4, 3), {x({2, 5, 4})});
  cases["Linear_no_bias"] = CHORALE_CASE(Linear(4, 3, {.bias = false}), {x({5, 4})});
  cases["Bilinear"] = CHORALE_CASE(Bilinear(3, 4, 2), {x({5, 3}), x({5, 4})});
  cases["Bilinear_no_bias"] = CHORALE_CASE(Bilinear(3, 4, 2, {.bias = false}), {x({2, 5, 3}), x({2, 5, 4})});
  cases["Embedding"] = CHORALE_CASE(Embedding(6, 4), {ints({2, 5})});
  cases["Embedding_padding"] = CHORALE_CASE(Embedding(6, 4, {.padding_idx = -2}), {ints({2, 5}, 0, 6)});
  cases["Embedding_sparse"] = CHORALE_CASE(Embedding(6, 4, {.sparse = true}), {ints({7})});
  cases["EmbeddingBag_mean"] = CHORALE_CASE(EmbeddingBag(6, 4), {ints({2, 5})});
  cases["EmbeddingBag_sum_offsets"] = CHORALE_CASE(EmbeddingBag(6, 4, {.mode = BagMode::kSum, .padding_idx = 1}),
                                                   {ints({7}), fixed(Tensor::from({0L, 2L, 2L, 5L}, {4}))});
  cases["EmbeddingBag_max"] = CHORALE_CASE(EmbeddingBag(6, 4, {.mode = BagMode::kMax, .include_last_offset = true}),
                                           {ints({7}), fixed(Tensor::from({0L, 3L, 7L}, {3}))});
  cases["EmbeddingBag_weighted"] =
      CHORALE_CASE(EmbeddingBag(6, 4, {.mode = BagMode::kSum}), {ints({3, 4}), x({3, 4})},
                   [](EmbeddingBag& m, const std::vector<Tensor>& in) { return m(in[0], Tensor(), in[1]); });
}

void add_convolutions(Cases& cases) {
  cases["Conv1d"] = CHORALE_CASE(Conv1d(4, 6, {.kernel = 3, .stride = 2, .padding = 1}), {x({2, 4, 9})});
  cases["Conv1d_groups"] = CHORALE_CASE(
      Conv1d(4, 6, {.kernel = 3, .padding = 2, .dilation = 2, .groups = 2, .bias = false}), {x({2, 4, 9})});
  cases["Conv2d"] = CHORALE_CASE(Conv2d(3, 4, {.kernel = 3, .padding = 1}), {x({2, 3, 5, 6})});
  cases["Conv2d_uneven"] = CHORALE_CASE(
      Conv2d(2, 4, {.kernel = {3, 2}, .stride = {2, 1}, .padding = {0, 1}, .dilation = {1, 2}, .groups = 2}),
      {x({2, 2, 7, 6})});
  cases["Conv2d_no_batch"] = CHORALE_CASE(Conv2d(3, 4, {.kernel = 2}), {x({3, 5, 5})});
  cases["Conv2d_reflect"] = CHORALE_CASE(
      Conv2d(2, 3, {.kernel = 3, .padding = {1, 2}, .padding_mode = PadMode::kReflect}), {x({2, 2, 5, 6})});
  cases["Conv2d_replicate"] =
      CHORALE_CASE(Conv2d(2, 3, {.kernel = 3, .padding = 1, .padding_mode = PadMode::kReplicate}), {x({2, 2, 5, 6})});
  cases["Conv3d"] = CHORALE_CASE(Conv3d(2, 3, {.kernel = 2, .stride = {1, 2, 1}, .padding = 1}), {x({1, 2, 4, 5, 3})});
  cases["ConvTranspose1d"] = CHORALE_CASE(
      ConvTranspose1d(4, 3, {.kernel = 3, .stride = 2, .padding = 1, .output_padding = 1}), {x({2, 4, 5})});
  cases["ConvTranspose2d"] =
      CHORALE_CASE(ConvTranspose2d(4, 6, {.kernel = 3, .stride = 2, .padding = 1, .output_padding = 1, .groups = 2}),
                   {x({2, 4, 3, 4})});
  cases["ConvTranspose2d_dilated"] =
      CHORALE_CASE(ConvTranspose2d(2, 3, {.kernel = {2, 3}, .dilation = 2, .bias = false}), {x({1, 2, 3, 4})});
  cases["ConvTranspose3d"] = CHORALE_CASE(ConvTranspose3d(2, 3, {.kernel = 2, .stride = 2}), {x({1, 2, 2, 3, 2})});
}

void add_norms(Cases& cases) {
  cases["BatchNorm1d"] = CHORALE_CASE(BatchNorm1d(3), {x({5, 3})});
  cases["BatchNorm1d_sequence"] = CHORALE_CASE(BatchNorm1d(3, {.eps = 1e-3, .momentum = 0.3}), {x({4, 3, 5})});
  cases["BatchNorm2d"] = CHORALE_CASE(BatchNorm2d(3), {x({2, 3, 4, 5})});
  cases["BatchNorm2d_eval"] = CHORALE_CASE(BatchNorm2d(3), {x({2, 3, 4, 5})}, false);
  cases["BatchNorm2d_cumulative"] = CHORALE_CASE(BatchNorm2d(3, {.momentum = {}}), {x({2, 3, 4, 5})},
                                                 [](BatchNorm2d& m, const std::vector<Tensor>& in) {
                                                   m(in[0]);
                                                   return m(2 * in[0]);
                                                 });
  cases["BatchNorm2d_no_stats"] =
      CHORALE_CASE(BatchNorm2d(3, {.track_running_stats = false}), {x({2, 3, 4, 5})}, false);
  cases["BatchNorm2d_plain"] = CHORALE_CASE(BatchNorm2d(3, {.affine = false}), {x({2, 3, 4, 5})});
  cases["BatchNorm3d"] = CHORALE_CASE(BatchNorm3d(2), {x({2, 2, 3, 2, 3})});
  cases["InstanceNorm1d"] = CHORALE_CASE(InstanceNorm1d(3), {x({2, 3, 5})});
  cases["InstanceNorm2d"] =
      CHORALE_CASE(InstanceNorm2d(3, {.affine = true, .track_running_stats = true}), {x({2, 3, 4, 5})});
  cases["InstanceNorm2d_eval"] =
      CHORALE_CASE(InstanceNorm2d(3, {.affine = true, .track_running_stats = true}), {x({2, 3, 4, 5})}, false);
  cases["InstanceNorm2d_no_batch"] = CHORALE_CASE(InstanceNorm2d(3), {x({3, 4, 5})});
  cases["InstanceNorm3d"] = CHORALE_CASE(InstanceNorm3d(2, {.affine = true}), {x({2, 2, 3, 2, 3})});
  cases["LayerNorm"] = CHORALE_CASE(LayerNorm(6), {x({2, 3, 6})});
  cases["LayerNorm_2"] = CHORALE_CASE(LayerNorm({3, 4}, {.eps = 1e-3}), {x({2, 3, 4})});
  cases["LayerNorm_no_bias"] = CHORALE_CASE(LayerNorm(6, {.bias = false}), {x({2, 3, 6})});
  cases["LayerNorm_plain"] = CHORALE_CASE(LayerNorm(6, {.affine = false}), {x({2, 3, 6})});
  cases["RMSNorm"] = CHORALE_CASE(RMSNorm(6), {x({2, 3, 6})});
  cases["RMSNorm_eps"] = CHORALE_CASE(RMSNorm({3, 4}, {.eps = 1e-2, .affine = false}), {x({2, 3, 4})});
  cases["GroupNorm"] = CHORALE_CASE(GroupNorm(2, 6), {x({2, 6, 3, 4})});
  cases["GroupNorm_plain"] = CHORALE_CASE(GroupNorm(3, 6, {.eps = 1e-3, .affine = false}), {x({2, 6, 5})});
}

void add_pools(Cases& cases) {
  cases["MaxPool1d"] = CHORALE_CASE(MaxPool1d(3, {.stride = 2, .padding = 1}), {x({2, 3, 9})});
  cases["MaxPool2d"] = CHORALE_CASE(MaxPool2d(2), {x({2, 3, 6, 5})});
  cases["MaxPool2d_ceil"] =
      CHORALE_CASE(MaxPool2d({3, 2}, {.stride = 2, .padding = {1, 0}, .ceil_mode = true}), {x({2, 3, 6, 5})});
  cases["AvgPool1d"] = CHORALE_CASE(AvgPool1d(3, {.stride = 2, .padding = 1}), {x({2, 3, 9})});
  cases["AvgPool2d"] = CHORALE_CASE(AvgPool2d({2, 3}, {.padding = 1, .count_include_pad = false}), {x({2, 3, 6, 5})});
  cases["AvgPool2d_divisor"] =
      CHORALE_CASE(AvgPool2d(2, {.ceil_mode = true, .divisor_override = 3}), {x({2, 3, 5, 5})});
  cases["AdaptiveAvgPool1d"] = CHORALE_CASE(AdaptiveAvgPool1d(4), {x({2, 3, 9})});
  cases["AdaptiveAvgPool2d"] = CHORALE_CASE(AdaptiveAvgPool2d({3, 2}), {x({2, 3, 5, 7})});
  cases["Flatten"] = CHORALE_CASE(Flatten(), {x({2, 3, 4})});
  cases["Dropout_eval"] = CHORALE_CASE(Dropout(0.5), {x({3, 4})}, false);
}

}  // namespace

Cases layer_cases() {
  Cases cases;
  add_activations(cases);
  add_linears(cases);
  add_convolutions(cases);
  add_norms(cases);
  add_pools(cases);
  return cases;
}

}  // namespace chorale::nn::oracle
