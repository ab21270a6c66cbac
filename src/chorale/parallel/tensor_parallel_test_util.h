// What the tests of tensor parallel share.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <string>

#include "chorale/api/api.h"
#include "chorale/nn/nn.h"
#include "chorale/op/samples.h"
#include "chorale/parallel/tensor_parallel.h"

namespace chorale::parallel {

inline constexpr int kWorld = 4;

inline Placements at(std::initializer_list<Placement> list) { return list; }

inline void expect_near(const Tensor& a, const Tensor& b, double tolerance, const std::string& what = {}) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i)
    ASSERT_NEAR(x[i], y[i], tolerance * (1 + std::abs(y[i]))) << what << " element " << i;
}

inline Tensor chunk_of_rank(const Tensor& x, int64_t dim, int rank) {
  const op::Chunk chunk = op::chunk_of(x.size(dim), kWorld, rank);
  return narrow(x, dim, chunk.first, chunk.size);
}

// The same numbers on every rank, in f64.
template <class M>
M filled(M module) {
  module.to(DType::kF64);
  const NoGrad quiet;
  int seed = 1;
  for (const Tensor& p : module.parameters()) copy_(p, op::sample(p.sizes(), seed++));
  return module;
}

struct Mlp : nn::Module {
  nn::Linear net1{10, 16}, net2{16, 10};
  CHORALE_MODULE(Mlp, net1, net2)
  Tensor forward(const Tensor& x) { return net2(relu(net1(x))); }
};

}  // namespace chorale::parallel
