// The cases of `chorale bench ops`.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale::app {

struct OpInput {
  Shape sizes;
  DType dtype = DType::kF32;
  int64_t below = 0;  // i64 indices below this, where it is not 0
};

struct OpCase {
  std::string name;  // OP/DTYPE/SHAPE[/grad]
  std::string op;
  std::vector<OpInput> in;
  bool grad = false;
  size_t bytes = 0;  // read and written, for ops that memory bounds; 0 for the others

  int64_t elements() const;
};

std::vector<OpCase> op_cases();

using OpCall = std::function<Tensor(const std::vector<Tensor>&)>;
// The call behind a name of OpCase::op; bench/peers/torch_ops.py has PyTorch's.
OpCall op_call(const std::string& op);

}  // namespace chorale::app
