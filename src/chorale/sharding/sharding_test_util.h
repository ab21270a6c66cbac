// What tests of sharded tensors share.
#pragma once

#include <gtest/gtest.h>

#include <functional>

#include "chorale/api/api.h"
#include "chorale/comm/comm_counter.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/op/samples.h"
#include "chorale/sharding/builder.h"
#include "chorale/sharding/explanation.h"
#include "chorale/sharding/sharded.h"

namespace chorale {

using comm::CallKind;
using comm::CommCounter;
using comm::run_ranks;

inline Placements at(std::initializer_list<Placement> list) { return list; }

// Numbers that depend on the place only: equal on every rank.
inline Tensor numbers(const Shape& sizes, double first = 0, DType dtype = DType::kF64) {
  std::vector<double> values;
  for (int64_t i = 0; i < count_elems(sizes); ++i) values.push_back(first + static_cast<double>(i));
  return to(Tensor::from(values, sizes), dtype);
}

inline void expect_near(const Tensor& a, const Tensor& b, double tolerance, const std::string& what = {}) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_NEAR(x[i], y[i], tolerance * (1 + std::abs(y[i]))) << what << " element " << i << " of " << a.sizes();
  }
}
inline void expect_same(const Tensor& a, const Tensor& b, const std::string& what = {}) { expect_near(a, b, 0, what); }

// The chunk of a rank along a dimension.
inline Tensor chunk_of_rank(const Tensor& x, int64_t dim, int rank, int ranks) {
  const op::Chunk chunk = op::chunk_of(x.size(dim), ranks, rank);
  return narrow(x, dim, chunk.first, chunk.size);
}

}  // namespace chorale
