// How examples become a batch: collate(std::vector<Example>) → Batch, a function that a program overloads, beside its
// own type, for what is not listed here.
#pragma once

#include <array>
#include <tuple>
#include <utility>
#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale::data {

// What most data sets yield: an input and what it should give. A batch of them is one of the same type.
struct Example {
  Tensor x, y;
};

// Tensors of one shape are stacked along a new first dimension. An undefined one stands for a part that a data set has
// not (labels of a test set); then all must be undefined.
Tensor collate(const std::vector<Tensor>& parts);
Example collate(const std::vector<Example>& examples);

// Numbers become a vector.
template <class T>
requires requires { DTypeOf<T>::value; }
Tensor collate(const std::vector<T>& numbers) { return Tensor::from(numbers, {static_cast<int64_t>(numbers.size())}); }

// Pairs, tuples and arrays are collated part by part; declared first, since they may hold each other.
template <class... Parts>
auto collate(const std::vector<std::tuple<Parts...>>& examples);
template <class A, class B>
auto collate(const std::vector<std::pair<A, B>>& examples);
template <class T, size_t N>
auto collate(const std::vector<std::array<T, N>>& examples);

template <size_t I, class Tuple>
auto collate_part(const std::vector<Tuple>& examples) {
  std::vector<std::tuple_element_t<I, Tuple>> parts;
  parts.reserve(examples.size());
  for (const Tuple& example : examples) parts.push_back(std::get<I>(example));
  return collate(parts);
}
template <class... Parts>
auto collate(const std::vector<std::tuple<Parts...>>& examples) {
  return [&]<size_t... I>(std::index_sequence<I...>) { return std::make_tuple(collate_part<I>(examples)...); }
  (std::index_sequence_for<Parts...>());
}
template <class A, class B>
auto collate(const std::vector<std::pair<A, B>>& examples) {
  return std::make_pair(collate_part<0>(examples), collate_part<1>(examples));
}
template <class T, size_t N>
auto collate(const std::vector<std::array<T, N>>& examples) {
  return [&]<size_t... I>(std::index_sequence<I...>) { return std::array{collate_part<I>(examples)...}; }
  (std::make_index_sequence<N>());
}

}  // namespace chorale::data
