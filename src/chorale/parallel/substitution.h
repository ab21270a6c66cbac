// Other tensors in the places of a module's own, for as long as the scope lasts: to compute with parameters that are
// not the module's (meta-learning, averages, lower precision).
//
//   {
//     const Substitution scope(model, {{"fc1.weight", w}});
//     y = model(x);  // the gradient of y goes to w
//   }
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "chorale/nn/module.h"

namespace chorale::parallel {

class Substitution {
 public:
  Substitution() = default;
  // Tensors are found by name; shapes must be equal. InvalidArgument for a name that the module does not have.
  Substitution(nn::Module& module, const NamedTensors& others);
  ~Substitution() { undo(); }
  Substitution(const Substitution&) = delete;
  Substitution& operator=(const Substitution&) = delete;

  // Puts `other` in the place of a member until the end.
  void replace(Tensor& member, const Tensor& other);
  // The same, whatever its shape: a sharded tensor for its part.
  void put(Tensor& member, const Tensor& other);
  void undo();

 private:
  std::vector<std::pair<Tensor*, Tensor>> before_;
};

}  // namespace chorale::parallel
