// Sharded parameters as data-parallel training sees them: each is its local part between forwards, an ordinary leaf
// that hooks, buckets and optimizers know, under the same name and in the same object as ever. While a forward runs,
// the module's slots hold sharded tensors made of the leaves; gradients go back through that, reduced over the mesh of
// the shards, before any hook of the leaf sees them.
#pragma once

#include <string>
#include <unordered_map>
#include <unordered_set>

#include "chorale/nn/module.h"
#include "chorale/parallel/substitution.h"
#include "chorale/sharding/sharded.h"

namespace chorale::parallel {

class Localized {
 public:
  Localized() = default;
  // Sharded parameters and buffers of the module, but those with ignored names, become their local parts.
  Localized(nn::Module& module, const std::unordered_set<std::string>& ignored);

  bool empty() const { return specs_.empty(); }
  // Puts sharded tensors into the module's slots, until the scope ends.
  void enter(nn::Module& module, Substitution& scope) const;
  // The tensor as it would be in a forward, without history; any other tensor as it is.
  Tensor sharded(const Tensor& local) const;

 private:
  struct Spec {
    std::shared_ptr<const sharding::Layout> layout;
    Shape sizes;
    Strides strides;
    Tensor leaf;  // which keeps its address taken
  };
  std::unordered_map<const Tensor::Impl*, Spec> specs_;
};

}  // namespace chorale::parallel
