// What the scenarios of spec/collectives-and-ddp.md share: B(k, v) and how a tensor is compared with a value.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/trace/trace.h"

namespace chorale::comm {

template <class T>
T value_of(double value) {
  if constexpr (std::is_same_v<T, complex64>) {
    return T(static_cast<float>(value), static_cast<float>(value) + 1);
  } else {
    return static_cast<T>(value);
  }
}
template <class T = float>
Tensor filled(const Shape& sizes, T value) {
  const Tensor tensor = Tensor::empty(sizes, dtype_of<T>);
  std::fill_n(tensor.data<T>(), tensor.elems(), value);
  return tensor;
}
// A tensor whose element i is value(i).
template <class T, class Value>
Tensor numbered(const Shape& sizes, const Value& value) {
  const Tensor tensor = Tensor::empty(sizes, dtype_of<T>);
  for (int64_t i = 0; i < tensor.elems(); ++i) tensor.data<T>()[i] = value(i);
  return tensor;
}
// What element i of rank `sender` is in exchanges: no two elements of one sender are equal, nor are elements at the
// same place of two senders.
template <class T>
T sent_by(int sender, int64_t i) {
  return value_of<T>(static_cast<double>(1000 * sender + i));
}
// The spec's B(k, v).
inline Tensor cube(int64_t k, double value) { return filled<float>({k, k, k}, static_cast<float>(value)); }

template <class T>
bool all_equal(const Tensor& tensor, T value) {
  for (int64_t i = 0; i < tensor.elems(); ++i) {
    if (!(tensor.data<T>()[i] == value)) return false;
  }
  return true;
}
inline bool is_cube(const Tensor& tensor, int64_t k, double value) {
  return tensor.sizes() == Shape{k, k, k} && all_equal(tensor, static_cast<float>(value));
}

// The three groups of most rows: the default one, [1, 2] and a new one of all ranks. Runs `body` in each on its
// members.
inline void in_every_group(Group& world, const std::function<void(Group&)>& body) {
  body(world);
  if (world.size() >= 3) {
    Group sub = world.new_group({1, 2});
    if (sub.is_member()) body(sub);
  }
  Group full = world.duplicate();
  body(full);
}

// The same among four ranks.
inline constexpr int kWorldRanks = 4;
inline void in_all_groups(const std::function<void(Group&)>& body) {
  run_ranks(kWorldRanks, [&](Group& world) { in_every_group(world, body); });
}

// The events of a run with the trace on.
inline std::vector<trace::Event> traced(int size, const std::function<void(Group&)>& body) {
  trace::start();
  run_ranks(size, body);
  return trace::stop();
}
inline int count_events(const std::vector<trace::Event>& events, const std::string& name, int rank) {
  int count = 0;
  for (const trace::Event& event : events) count += event.name == name && event.rank == rank ? 1 : 0;
  return count;
}

}  // namespace chorale::comm
