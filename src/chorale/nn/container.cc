#include "chorale/nn/container.h"

#include "chorale/op/view.h"

namespace chorale::nn {

Sequential::Sequential(const Sequential& other) : Module(other) {
  for (const auto& step : other.steps_) steps_.push_back(step->copy());
}

void Sequential::visit_members(MemberVisitor& visitor) {
  for (size_t i = 0; i < size(); ++i) visitor.module(std::to_string(i), steps_[i]->module());
}

Module& Sequential::operator[](size_t place) const {
  CHORALE_CHECK(place < size(), "[Sequential] there is no layer ", place, " among ", size());
  return steps_[place]->module();
}

Tensor Sequential::forward(const Tensor& x) {
  Tensor value = x;
  for (const auto& step : steps_) value = step->call(value);
  return value;
}

Tensor Sequential::forward(const Tensor& x) const {
  Tensor value = x;
  for (const auto& step : steps_) value = static_cast<const Step&>(*step).call(value);
  return value;
}

Tensor Flatten::forward(const Tensor& x) const { return flatten(x, start_, end_); }

}  // namespace chorale::nn
