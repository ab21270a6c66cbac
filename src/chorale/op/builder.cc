#include "chorale/op/builder.h"

#include <algorithm>

#include "chorale/base/error.h"

namespace chorale::op {

namespace detail {
constinit thread_local const Stack* current = nullptr;
}

Tensor Builder::draw(Generator& generator, int64_t words, Device device, Rest rest) {
  return rest.draw(generator, words, device);
}

void Builder::set_data(const Tensor& x, const Tensor& other, Rest rest) { rest.set_data(x, other); }

std::shared_ptr<Builder> Builder::keep() {
  return {std::shared_ptr<void>{}, this};  // shares nothing
}

void Stack::put(Builder& builder) {
  Builder** at = builders_;
  while (*at && (*at)->place() < builder.place()) ++at;
  if (!*at || (*at)->place() != builder.place()) std::move_backward(at, std::end(builders_) - 1, std::end(builders_));
  *at = &builder;
}

Stack Stack::without(Place place) const {
  Stack other{};
  for (Builder* const* at = builders_; *at; ++at) {
    if ((*at)->place() != place) other.put(**at);
  }
  return other;
}

Builder* Stack::at(Place place) const {
  for (Builder* const* at = builders_; *at; ++at) {
    if ((*at)->place() == place) return *at;
  }
  return nullptr;
}

bool Stack::may_reuse_memory() const {
  for (Builder* const* at = builders_; *at; ++at) {
    if (!(*at)->may_reuse_memory()) return false;
  }
  return true;
}

KeptStack::KeptStack(const Stack& stack) : stack_{} {
  for (size_t place = 0; place < kPlaces; ++place) {
    Builder* builder = stack.at(static_cast<Place>(place));
    if (!builder) continue;
    builders_.push_back(builder->keep());
    stack_ = stack_.with(*builders_.back());
  }
}

Tensors not_differentiable(const GradArgs&) { throw InternalError("the gradient of an op without one was asked for"); }

}  // namespace chorale::op
