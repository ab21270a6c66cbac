// Where backward puts the gradients of leaves: their own gradients unless it is told otherwise.
#pragma once

#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale::autograd {

// What is known of a gradient that arrives.
struct Arrival {
  bool create_graph = false;  // it has a history, which sums must keep
  bool owned = false;         // nobody else sees its bytes: it may be kept as it is and written later
};

// Several backward passes, in different threads, may use one sink.
class GradSink {
 public:
  virtual ~GradSink() = default;
  // Adds a gradient to what is there for `leaf`; it comes once per backward. accumulate() below does the adding.
  virtual void accept(const Tensor& leaf, Tensor gradient, Arrival arrival) = 0;
  // What is there, undefined for nothing; and something else in its place (an average over ranks).
  virtual Tensor gradient(const Tensor& leaf) = 0;
  virtual void set_gradient(const Tensor& leaf, const Tensor& gradient) = 0;
  // Memory in which the gradient is wanted if one op makes it; undefined: anywhere.
  virtual Tensor destination(const Tensor&) { return {}; }
};

// Adds `gradient` to `sum`, which becomes a tensor whose bytes belong to it.
void accumulate(Tensor& sum, Tensor gradient, Arrival arrival);

// The leaves' own gradients.
GradSink& grad_field_sink();

// Gradients by leaf, apart from the leaves' own.
//
//   GradientMap gradients;
//   backward(loss, {}, {.sink = &gradients});
//   gradients.gradient(w);
class GradientMap final : public GradSink {
 public:
  void accept(const Tensor& leaf, Tensor gradient, Arrival arrival) override;
  Tensor gradient(const Tensor& leaf) override;
  void set_gradient(const Tensor& leaf, const Tensor& gradient) override;
  // Leaves and their gradients, in the order in which the first gradient of each came.
  std::vector<std::pair<Tensor, Tensor>> entries() const;

 private:
  Tensor& place_of(const Tensor& leaf);

  mutable std::mutex mutex_;
  std::vector<std::pair<Tensor, Tensor>> entries_;  // they keep the leaves, so that an address is never another's
  std::unordered_map<const Tensor::Impl*, size_t> position_;
};

}  // namespace chorale::autograd
