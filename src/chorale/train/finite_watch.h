// Finds the layer in which numbers of a step stop being finite.
#pragma once

#include <string>
#include <vector>

#include "chorale/nn/module.h"

namespace chorale::train {

bool is_finite(const Tensor& x);  // true for whole numbers, and for a tensor that is undefined

// Looks at everything that the layers of a model give and get, while it exists. This takes time: for a step that is
// repeated since something is known to be wrong.
class FiniteWatch {
 public:
  explicit FiniteWatch(nn::Module& model);
  ~FiniteWatch();
  FiniteWatch(const FiniteWatch&) = delete;
  FiniteWatch& operator=(const FiniteWatch&) = delete;

  // The first thing that was not finite: "the output of layer h.0.attn (Gpt2Attention)". Empty: there was none.
  const std::string& first() const { return first_; }
  void note(const std::string& what) {
    if (first_.empty()) first_ = what;
  }

 private:
  void look_at(const std::vector<Tensor>& tensors, const std::string& what);

  std::string first_;
  std::vector<HookHandle> hooks_;
};

}  // namespace chorale::train
