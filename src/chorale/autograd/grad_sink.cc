#include "chorale/autograd/grad_sink.h"

#include <array>

#include "chorale/autograd/gradient_watch.h"
#include "chorale/autograd/node.h"
#include "chorale/op/copy.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/sparse.h"

namespace chorale::autograd {

constinit thread_local GradientWatch* gradient_watch = nullptr;

void accumulate(Tensor& sum, Tensor gradient, Arrival arrival) {
  if (!sum.defined()) {
    sum = arrival.create_graph || arrival.owned || gradient.is_sparse() ? std::move(gradient) : clone(gradient);
  } else if (arrival.create_graph || sum.is_sparse()) {
    sum = sparse_add(sum, gradient);
  } else if (sum.is_sharded()) {
    sum = add(sum, gradient);  // which may be placed otherwise
  } else if (gradient.is_sparse()) {
    sparse_add_(sum, gradient);
  } else {
    add_(sum, gradient);
  }
}

namespace {

// Adds a sharded gradient to what `place()` refers to, which `mutex` guards. Ops on sharded tensors may wait for other
// ranks, and those may be threads of this process that need the same lock: they run without it, and once more if
// another thread was faster.
template <class Place>
void accept_sharded(std::mutex& mutex, const Place& place, const Tensor& gradient, Arrival arrival) {
  for (;;) {
    Tensor before;
    {
      const std::lock_guard lock(mutex);
      before = place();
    }
    Tensor sum = before;
    accumulate(sum, gradient, arrival);
    const std::lock_guard lock(mutex);
    Tensor& now = place();
    if (now.impl() != before.impl()) continue;
    now = std::move(sum);
    return;
  }
}

// Two backward passes in different threads may meet at a leaf.
class GradFieldSink final : public GradSink {
 public:
  void accept(const Tensor& leaf, Tensor gradient, Arrival arrival) override {
    watch_read(leaf);
    if (gradient.is_sharded() || leaf.is_sharded()) [[unlikely]] {
      const auto place = [&]() -> Tensor& { return slot_for_writing(leaf).grad; };
      return accept_sharded(mutex_of(leaf), place, gradient, arrival);
    }
    const std::lock_guard lock(mutex_of(leaf));
    Slot& slot = slot_for_writing(leaf);
    const Tensor destination = destination_of(slot);
    if (!destination.defined() || arrival.create_graph) {
      accumulate(slot.grad, std::move(gradient), arrival);
      return;
    }
    if (!gradient.is(destination)) copy_(destination, to_dense(gradient));
    slot.grad = destination;
  }
  Tensor gradient(const Tensor& leaf) override {
    watch_read(leaf);
    const std::lock_guard lock(mutex_of(leaf));
    const Slot* slot = slot_of(leaf);
    return slot ? slot->grad : Tensor{};
  }
  void set_gradient(const Tensor& leaf, const Tensor& gradient) override {
    watch_replaced(leaf);
    const std::lock_guard lock(mutex_of(leaf));
    slot_for_writing(leaf).grad = gradient;
  }
  Tensor destination(const Tensor& leaf) override {
    watch_read(leaf);
    const std::lock_guard lock(mutex_of(leaf));
    const Slot* slot = slot_of(leaf);
    return slot ? destination_of(*slot) : Tensor{};
  }

 private:
  // Where the first gradient should be written; later ones are added to it.
  static Tensor destination_of(const Slot& slot) {
    return slot.extras && !slot.grad.defined() ? slot.extras->destination : Tensor{};
  }
  std::mutex& mutex_of(const Tensor& leaf) {
    return mutexes_[reinterpret_cast<uintptr_t>(leaf.impl()) / 64 % mutexes_.size()];
  }
  std::array<std::mutex, 64> mutexes_;
};

}  // namespace

GradSink& grad_field_sink() {
  static auto* const sink = new GradFieldSink;
  return *sink;
}

Tensor& GradientMap::place_of(const Tensor& leaf) {
  const auto [found, fresh] = position_.emplace(leaf.impl(), entries_.size());
  if (fresh) entries_.emplace_back(leaf, Tensor{});
  return entries_[found->second].second;
}

void GradientMap::accept(const Tensor& leaf, Tensor gradient, Arrival arrival) {
  if (gradient.is_sharded() || leaf.is_sharded()) {
    const auto place = [&]() -> Tensor& { return place_of(leaf); };
    return accept_sharded(mutex_, place, gradient, arrival);
  }
  const std::lock_guard lock(mutex_);
  accumulate(place_of(leaf), std::move(gradient), arrival);
}

Tensor GradientMap::gradient(const Tensor& leaf) {
  const std::lock_guard lock(mutex_);
  const auto found = position_.find(leaf.impl());
  return found == position_.end() ? Tensor{} : entries_[found->second].second;
}

void GradientMap::set_gradient(const Tensor& leaf, const Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  place_of(leaf) = gradient;
}

std::vector<std::pair<Tensor, Tensor>> GradientMap::entries() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<Tensor, Tensor>> found;
  for (const auto& entry : entries_) {
    if (entry.second.defined()) found.push_back(entry);
  }
  return found;
}

}  // namespace chorale::autograd
