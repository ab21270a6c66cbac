// Data-parallel training in lower precision: forward and backward compute with parameters of a lower dtype, made anew
// before each forward from masters in full precision, which stay the module's parameters, have the gradients and are
// saved.
#pragma once

#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "chorale/parallel/substitution.h"

namespace chorale::parallel {

// Dtypes of floating tensors; none: they stay as they are.
struct MixedPrecision {
  std::optional<DType> parameters{};
  std::optional<DType> reduce{};  // in which gradients are averaged; none: as `parameters`
  std::optional<DType> buffers{};
};

class MixedParameters {
 public:
  MixedParameters(nn::Module& module, const MixedPrecision& precision, std::unordered_set<std::string> ignored);

  const MixedPrecision& precision() const { return precision_; }
  // A master, and what the last forward computed with.
  struct Entry {
    std::string name;
    Tensor master;
    Tensor shadow;
  };
  const std::vector<Entry>& entries() const { return entries_; }

  // Puts shadows in the places of their masters for a forward, until the scope ends.
  void enter(Substitution& scope);
  // An input in the parameters' dtype.
  void cast(Tensor& input) const;

 private:
  nn::Module& module_;
  const MixedPrecision precision_;
  const std::unordered_set<std::string> ignored_;
  std::vector<Entry> entries_;
};

}  // namespace chorale::parallel
