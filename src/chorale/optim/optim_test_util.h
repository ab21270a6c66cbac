// What the tests of optim share.
#pragma once

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "chorale/api/api.h"
#include "chorale/testing/message_test_util.h"

namespace chorale::optim {

using Values = std::vector<double>;
inline Values values(const Tensor& x) { return x.to_vector<double>(); }

inline Tensor leaf(std::initializer_list<double> numbers) {
  return set_requires_grad(Tensor::from(numbers, {static_cast<int64_t>(numbers.size())}));
}

// The tensor called `name`.
inline Tensor& at(std::vector<std::pair<std::string, Tensor>>& state, const std::string& name) {
  for (auto& [key, tensor] : state) {
    if (key == name) return tensor;
  }
  throw std::out_of_range(name);
}

// The statement throws Kind with `part` in its message.
#define EXPECT_MESSAGE(Kind, part, ...)                                             \
  do {                                                                              \
    const std::string message = message_of<Kind>([&] { __VA_ARGS__; });             \
    EXPECT_NE(message.find(part), std::string::npos) << "the message: " << message; \
  } while (false)

}  // namespace chorale::optim
