// Small tensors for tests, and what is in them.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "chorale/tensor/tensor.h"
#include "chorale/testing/message_test_util.h"

namespace chorale {

// 0, 1, 2, … in row-major order.
template <class T = float>
Tensor iota(const Shape& sizes, T first = T(0)) {
  std::vector<T> values(static_cast<size_t>(count_elems(sizes)));
  std::iota(values.begin(), values.end(), first);
  return Tensor::from(values, sizes);
}

inline std::vector<double> values(const Tensor& x) { return x.to_vector<double>(); }

// Calls f(index) for every index of a shape in row-major order.
inline void for_each_index(const Shape& sizes, const std::function<void(const Shape&)>& f) {
  if (count_elems(sizes) == 0) return;
  Shape index(sizes.size(), 0);
  for (size_t d = 0; d != static_cast<size_t>(-1);) {
    f(index);
    for (d = sizes.size() - 1; d != static_cast<size_t>(-1); --d) {
      if (++index[d] < sizes[d]) break;
      index[d] = 0;
    }
  }
}

// The element at an index, read through strides: the slow way that needs no op.
inline double at(const Tensor& x, const Shape& index) {
  int64_t offset = x.offset();
  for (size_t d = 0; d < index.size(); ++d) offset += index[d] * x.strides()[d];
  return x.view_as({}, {}, offset).item<double>();
}

// A tensor made element by element.
inline Tensor build(const Shape& sizes, const std::function<double(const Shape&)>& f, DType dtype = DType::kF64) {
  std::vector<double> list;
  for_each_index(sizes, [&](const Shape& index) { list.push_back(f(index)); });
  Tensor x = Tensor::empty(sizes, dtype);
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (size_t i = 0; i < list.size(); ++i) x.span<T>()[i] = Scalar(list[i]).to<T>();
  });
  return x;
}

inline void expect_equal(const Tensor& actual, const Tensor& expected) {
  EXPECT_EQ(actual.sizes(), expected.sizes());
  EXPECT_EQ(actual.dtype(), expected.dtype());
  EXPECT_EQ(values(actual), values(expected));
}
inline void expect_tensor(const Tensor& actual, const Shape& sizes, const std::vector<double>& expected) {
  EXPECT_EQ(actual.sizes(), sizes);
  EXPECT_EQ(values(actual), expected);
}

// Shapes of rank 1 to `most` with sizes 1 to 5, and one of them now and then 0.
class RandomShapes {
 public:
  explicit RandomShapes(unsigned seed) : engine_(seed) {}
  int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }
  Shape shape(int64_t most = 4) {
    Shape sizes(static_cast<size_t>(pick(1, most)));
    for (int64_t& size : sizes) size = pick(1, 5);
    if (pick(0, 15) == 0) sizes[static_cast<size_t>(pick(0, static_cast<int64_t>(sizes.size()) - 1))] = 0;
    return sizes;
  }

 private:
  std::mt19937 engine_;
};

}  // namespace chorale
