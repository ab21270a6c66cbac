// The functions of tensors as their headers declare them, for `chorale ops NAME`.
#pragma once

#include <string>
#include <vector>

namespace chorale::app {

struct OpFunction {
  std::string name;
  std::string declaration;  // "Tensor flatten(const Tensor& x, int64_t start = 0, int64_t end = -1)"
  std::string comment;      // of its header; may be empty
};

// The functions that a header's text declares, in its order, without operators.
std::vector<OpFunction> functions_in(const std::string& header);
// All that op/functions.h declares.
const std::vector<OpFunction>& op_functions();

}  // namespace chorale::app
