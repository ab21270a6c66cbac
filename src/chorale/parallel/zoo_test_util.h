// The small models that the tests of data-parallel training share, and how two models are compared.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <tuple>

#include "chorale/api/api.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/nn/nn.h"
#include "chorale/parallel/ddp.h"
#include "chorale/testing/message_test_util.h"

namespace chorale::parallel {

using comm::run_ranks;
using nn::Linear;

// Numbers in [-1, 1] that depend on `seed` and the place only: the same on all ranks.
inline Tensor pattern(const Shape& sizes, double seed, DType dtype = DType::kF32) {
  std::vector<double> values(static_cast<size_t>(count_elems(sizes)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(1.7 * static_cast<double>(i) + 12.9898 * seed + 0.3);
  return to(Tensor::from(values, sizes), dtype);
}
// Gives the parameters of a module values that depend on `seed` only.
template <class M>
M seeded(M module, double seed) {
  const NoGrad quiet;
  for (const auto& [name, parameter] : module.named_parameters()) {
    if (is_floating(parameter.dtype())) copy_(parameter, mul(pattern(parameter.sizes(), seed += 1), 0.5));
  }
  return module;
}

struct Net : nn::Module {
  Linear fc1{2, 10, {.bias = false}}, fc2{10, 50}, fc3{50, 4, {.bias = false}};
  nn::Parameter no_grad{Tensor::from<int64_t>({2, 2}, {2}), false};
  CHORALE_MODULE(Net, fc1, fc2, fc3, no_grad)
  Net() { set_requires_grad(fc2.bias, false); }
  Tensor forward(const Tensor& x) { return softmax(fc3(relu(fc2(relu(fc1(x))))), 1); }
};

struct TwoLin : nn::Module {
  Linear a{10, 10, {.bias = false}}, b{10, 1, {.bias = false}};
  CHORALE_MODULE(TwoLin, a, b)
  std::tuple<Tensor, Tensor> forward(const Tensor& x) { return {a(x), b(x)}; }
};

struct UnusedTwoLin : nn::Module {
  Linear a{10, 10, {.bias = false}}, b{10, 10, {.bias = false}}, c{5, 5, {.bias = false}};
  CHORALE_MODULE(UnusedTwoLin, a, b, c)
  std::tuple<Tensor, Tensor> forward(const Tensor& x) { return {a(x), b(x)}; }
};

struct DictOut : nn::Module {
  UnusedTwoLin inner;
  CHORALE_MODULE(DictOut, inner)
  std::map<std::string, std::vector<Tensor>> forward(const Tensor& x) {
    const auto [a, b] = inner(x);
    return {{"predictions", {a, b}}, {"loss", {sum(add(a, b))}}};
  }
};

struct EmbNet : nn::Module {
  nn::Embedding embedding;
  Linear lin;
  std::optional<Linear> extra;
  CHORALE_MODULE(EmbNet, embedding, lin, extra)
  explicit EmbNet(int rank, bool with_extra = false)
      : embedding(10, with_extra || rank == 0 ? 500 : 50), lin(with_extra || rank == 0 ? 500 : 50, 1) {
    if (with_extra) extra.emplace(1, 1, nn::LinearOptions{.bias = false});
  }
  Tensor forward(const Tensor& ids) {
    const Tensor y = lin(embedding(ids));
    return extra ? (*extra)(y) : y;
  }
};

struct CtrlFlow : nn::Module {
  Linear lin1{10, 10, {.bias = false}}, lin2{10, 10, {.bias = false}};
  std::optional<int> only_rank{};  // lin2 is used on this rank only
  int rank = 0;
  CHORALE_MODULE(CtrlFlow, lin1, lin2)
  Tensor forward(const Tensor& x) {
    const std::vector<float> values = x.to_vector<float>();
    const bool ones = std::all_of(values.begin(), values.end(), [](float v) { return v == 1; });
    const Tensor y = relu(lin1(x));
    return ones && (!only_rank || *only_rank == rank) ? lin2(y) : y;
  }
};

struct BufNet : nn::Module {
  Linear a{10, 10, {.bias = false}}, b{10, 1, {.bias = false}};
  nn::Buffer buffer{pattern({1, 2}, 5)};
  bool adds = true;  // forward adds 1 to the buffer
  CHORALE_MODULE(BufNet, a, b, buffer)
  Tensor forward(const Tensor& x) {
    if (adds) add_(buffer, 1);
    return b(a(x));
  }
};

struct BatchNormNet : nn::Module {
  Linear fc1{2, 40, {.bias = false}};
  nn::BatchNorm1d bn;
  Linear fc2{40, 4, {.bias = false}};
  CHORALE_MODULE(BatchNormNet, fc1, bn, fc2)
  explicit BatchNormNet(bool affine = true) : bn(4, {.affine = affine}) {}
  Tensor forward(const Tensor& x) { return softmax(fc2(reshape(bn(reshape(fc1(x), {-1, 4, 10})), {-1, 40})), 1); }
};

struct Task : nn::Module {
  nn::Parameter p;
  CHORALE_MODULE(Task, p)
  Task() : p(ones({2, 2})) {}
  Tensor forward(const Tensor& x) { return add(p, x); }
};

// |a - b| <= atol + rtol |b|, by default with the tolerances for f32.
inline void expect_close(const Tensor& a, const Tensor& b, const std::string& what = {}, double rtol = 1.3e-6,
                         double atol = 1e-5) {
  ASSERT_EQ(a.defined(), b.defined()) << what;
  if (!a.defined()) return;
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  ASSERT_EQ(a.dtype(), b.dtype()) << what;
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_LE(std::abs(x[i] - y[i]), atol + rtol * std::abs(y[i]))
        << what << " at " << i << ": " << x[i] << ", " << y[i];
  }
}
inline bool equal_bits(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.to_vector<double>() == b.to_vector<double>();
}
// A number for the bits of all parameters of four bytes and more an element.
inline int64_t bits_of(const nn::Module& module) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const Tensor& p : module.parameters()) {
    const size_t bytes = static_cast<size_t>(p.elems()) * p.elem_bytes();
    for (size_t i = 0; i < bytes; i += sizeof(uint32_t)) {
      uint32_t word;
      std::memcpy(&word, static_cast<const std::byte*>(p.raw()) + i, sizeof(word));
      hash = (hash ^ word) * 0x100000001b3u;
    }
  }
  return static_cast<int64_t>(hash);
}
inline void expect_equal_parameters(const nn::Module& a, const nn::Module& b) {
  const auto mine = a.parameters();
  const auto other = b.named_parameters();
  ASSERT_EQ(mine.size(), other.size());
  for (size_t i = 0; i < mine.size(); ++i) expect_close(mine[i], other[i].second, other[i].first);
}
inline void expect_equal_gradients(const nn::Module& a, const nn::Module& b) {
  const auto mine = a.parameters();
  const auto other = b.named_parameters();
  ASSERT_EQ(mine.size(), other.size());
  for (size_t i = 0; i < mine.size(); ++i) expect_close(gradient(mine[i]), gradient(other[i].second), other[i].first);
}
// The tensor has the same bits on all ranks.
inline void expect_same_on_all_ranks(const comm::Group& group, const Tensor& x, const std::string& what = {}) {
  std::vector<Tensor> all;
  all.reserve(static_cast<size_t>(group.size()));
  for (int r = 0; r < group.size(); ++r) all.push_back(Tensor::empty(x.sizes(), x.dtype()));
  group.all_gather(all, detach(x)).wait();
  for (int r = 0; r < group.size(); ++r)
    EXPECT_TRUE(equal_bits(all[static_cast<size_t>(r)], x)) << what << " on rank " << r;
}

// The plain update of the parity loops: p + gradient; then gradients are dropped or zeroed.
inline void ascend(const nn::Module& module) {
  const NoGrad quiet;
  for (const Tensor& p : module.parameters()) {
    if (gradient(p).defined()) add_(p, gradient(p));
  }
}

// Five steps of `ddp` on its rows of a global batch, beside the reference on all rows; parameters are equal after each.
template <class Ddp, class M>
void parity_loop(Ddp& ddp, M& reference, const Tensor& batch, const Tensor& target, int64_t local, int64_t offset,
                 double scale = 1, bool to_none = false) {
  for (int step = 0; step < 5; ++step) {
    const Tensor x = roll(batch, {step}, {0});
    backward(mse_loss(reference(x), target));
    const Tensor y = ddp(narrow(x, 0, offset, local));
    backward(mul(mse_loss(y, narrow(target, 0, offset, local)), scale));
    ascend(reference);
    ascend(ddp.module());
    expect_equal_parameters(ddp.module(), reference);
    reference.zero_grad(to_none);
    ddp.zero_grad(to_none);
  }
}

inline testing::AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "no \"" << part << "\" in: " << text;
}
inline testing::AssertionResult has_not(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << part << "\" in: " << text;
}

}  // namespace chorale::parallel
