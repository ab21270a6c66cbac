// What tests of compiled functions share.
#pragma once

#include <string>
#include <vector>

#include "chorale/api/api.h"

namespace chorale {

using Values = std::vector<float>;

inline Tensor counted(const Shape& sizes, float from = 0) {
  std::vector<float> values(static_cast<size_t>(count_elems(sizes)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = from + static_cast<float>(i);
  return Tensor::from(values, sizes);
}
inline Values values(const Tensor& x) { return x.to_vector<float>(); }

template <class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace chorale
