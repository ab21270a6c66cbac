#include "chorale/api/variant.h"

#include <algorithm>

#include "chorale/autocast/autocast.h"
#include "chorale/autograd/autograd.h"
#include "chorale/base/error.h"
#include "chorale/base/same_bits.h"
#include "chorale/base/small_vector.h"
#include "chorale/op/device_scope.h"

namespace chorale::compiled {
namespace {

std::string text_of(const Argument& argument) {
  if (const auto* x = std::get_if<Tensor>(&argument.value)) {
    return x->defined() ? concat(x->dtype(), x->sizes()) : "undefined";
  }
  if (const auto* number = std::get_if<int64_t>(&argument.value)) return concat(*number);
  return concat(std::get<double>(argument.value));
}

}  // namespace

Modes modes_now() {
  return {autograd::mode.grad, autograd::mode.inference, autocast_dtype(), same_bits(), op::creation_device(kCpu)};
}

bool wants_grad(const Tensor& x) {
  const autograd::Slot* slot = x.defined() ? autograd::slot_of(x) : nullptr;
  // A view may have gained a history through its base; of others the slot says it all.
  return slot && (slot->view ? requires_grad(x) : slot->node || slot->requires_grad);
}

size_t first_on_storage(const std::vector<Argument>& arguments, size_t at) {
  const auto* x = std::get_if<Tensor>(&arguments[at].value);
  if (!x || !x->defined()) return at;
  for (size_t i = 0; i < at; ++i) {
    const auto* other = std::get_if<Tensor>(&arguments[i].value);
    if (other && other->defined() && other->storage() == x->storage()) return i;
  }
  return at;
}

std::string Frame::Variant::mismatch(const std::vector<Argument>& now, const CompileOptions& options) const {
  if (now.size() != arguments.size()) return concat(now.size(), " arguments, expected ", arguments.size());
  for (size_t i = 0; i < now.size(); ++i) {
    const ArgumentGuard& guard = arguments[i];
    if (now[i].value.index() != guard.then.value.index()) {
      return concat(now[i].source(), " has another type than before");
    }
    const auto* x = std::get_if<Tensor>(&now[i].value);
    if (!x) {
      if (now[i].value.index() == 1 ? std::get<int64_t>(now[i].value) != std::get<int64_t>(guard.then.value)
                                    : std::get<double>(now[i].value) != std::get<double>(guard.then.value)) {
        return concat(now[i].source(), " is ", text_of(now[i]), ", expected ", text_of(guard.then));
      }
      continue;
    }
    if (x->defined() != std::get<Tensor>(guard.then.value).defined()) {
      return concat(now[i].source(), x->defined() ? " is defined" : " is undefined");
    }
    if (!x->defined()) continue;
    const auto wrong = [&](const char* what, const auto& is, const auto& expected) {
      return concat(now[i].source(), ": ", what, " is ", is, ", expected ", expected);
    };
    if (x->dtype() != guard.layout.dtype) return wrong("dtype", x->dtype(), guard.layout.dtype);
    if (x->device() != guard.device) return wrong("device", x->device(), guard.device);
    if (x->dims() != static_cast<int64_t>(guard.layout.sizes.size())) {
      return wrong("number of dimensions", x->dims(), guard.layout.sizes.size());
    }
    for (size_t d = 0; d < guard.layout.sizes.size(); ++d) {
      if (x->sizes()[d] == guard.layout.sizes[d]) continue;
      return concat("tensor '", now[i].source(), "' size mismatch at index ", d, ": ", x->sizes()[d], ", expected ",
                    guard.layout.sizes[d]);
    }
    if (!(x->strides() == guard.layout.strides)) return wrong("strides", x->strides(), guard.layout.strides);
    if (wants_grad(*x) != guard.wants_grad) return wrong("requires_grad", wants_grad(*x), guard.wants_grad);
    const LayoutPtr placed = x->is_sharded() ? sharding::sharded(*x).layout : nullptr;
    if (!same_layout(placed, guard.placed)) return concat(now[i].source(), " is placed otherwise over a mesh");
    if (first_on_storage(now, i) != guard.same_storage_as) {
      return concat(now[i].source(), " shares its memory with other arguments than before");
    }
  }
  // For about two numbers a loop takes less time than a call of memcmp, and there are many tensors.
  const auto same = [](const auto& a, const auto& b) {
    bool equal = a.size() == b.size();
    for (size_t i = 0; equal && i < a.size(); ++i) equal = a[i] == b[i];
    return equal;
  };
  const auto lies_as = [&](const Tensor& x, const graph::Layout& layout) {
    return x.dtype() == layout.dtype && x.offset() == layout.offset && same(x.sizes(), layout.sizes) &&
           same(x.strides(), layout.strides);
  };
  SmallVector<std::pair<const Storage*, bool>, 4> storages;  // of arguments, and whether a captured tensor is on it
  for (const Argument& argument : now) {
    const auto* x = std::get_if<Tensor>(&argument.value);
    storages.push_back({x && x->defined() ? x->storage().get() : nullptr, false});
  }
  for (const CapturedGuard& guard : captured) {
    const Tensor& x = guard.handle;
    for (auto& [storage, is_captured] : storages) is_captured |= storage == guard.storage;
    if (x.storage().get() != guard.storage || !lies_as(x, guard.layout)) {
      return concat("a captured tensor of ", guard.layout.dtype, guard.layout.sizes, " has other memory");
    }
    if (wants_grad(x) != guard.wants_grad) {
      return concat("a captured tensor of ", guard.layout.dtype, guard.layout.sizes,
                    guard.wants_grad ? " requires no gradient any more" : " requires a gradient");
    }
  }
  for (size_t i = 0; i < now.size(); ++i) {
    const auto* then = std::get_if<Tensor>(&arguments[i].then.value);
    if (storages[i].second != arguments[i].is_captured ||
        ((storages[i].second || arguments[i].stays) && then->storage().get() != storages[i].first)) {
      return concat(now[i].source(), " shares its memory with other captured tensors than before");
    }
  }
  if (!(modes_now() == modes)) {
    return "gradients, inference, autocast, same bits or the device of new tensors are switched otherwise";
  }
  for (const GradientGuard& guard : gradients) {
    const Tensor gradient = chorale::gradient(guard.leaf);
    if (gradient.defined() != guard.has_one) {
      return concat("a captured tensor of ", guard.leaf.dtype(), guard.leaf.sizes(),
                    gradient.defined() ? " has a gradient already" : " has no gradient yet");
    }
    if (guard.fixed.defined() && !gradient.is(guard.fixed)) return "a gradient lies in other memory";
    for (size_t i = 0; i < now.size() && (guard.fixed.defined() || guard.argument != kNowhere); ++i) {
      const auto* x = std::get_if<Tensor>(&now[i].value);
      if ((x && gradient.impl() == x->impl()) != (i == guard.argument))
        return concat(now[i].source(), " is the gradient of another tensor than before");
    }
    if (guard.place == kNowhere) continue;
    const Tensor& part = part_of(gradient);
    const LayoutPtr placed = gradient.is_sharded() ? sharding::sharded(gradient).layout : nullptr;
    if (!lies_as(part, guard.layout) || part.device() != guard.device || !same_layout(placed, guard.placed) ||
        wants_grad(gradient)) {
      return concat("the gradient of a captured tensor of ", guard.leaf.dtype(), guard.leaf.sizes(),
                    " is of another kind");
    }
    if (is_shared(guard, gradient, now)) return "a gradient shares its memory with other tensors";
  }
  for (size_t i = 0; i < watched.size(); ++i) {
    if (options.watch[i]() != watched[i]) return concat("watched value ", i, " has changed from ", watched[i]);
  }
  return host_mismatch();
}

// Whether anything else that the graph looks at may be on the memory of a gradient.
bool Frame::Variant::is_shared(const GradientGuard& guard, const Tensor& gradient,
                               const std::vector<Argument>& now) const {
  const Tensor& part = part_of(gradient);
  if (part.storage()->use_count() > (gradient.is_sharded() ? 2 : 1)) return true;
  if (gradient.use_count() <= 2 && (!gradient.is_sharded() || part.use_count() == 1)) return false;
  for (size_t p = 0; p < outside.size(); ++p) {
    if (p != guard.place && outside_at(p, now).is(part)) return true;
  }
  return std::any_of(now.begin(), now.end(), [&](const Argument& argument) {
    const auto* x = std::get_if<Tensor>(&argument.value);
    return x && x->defined() && part_of(*x).is(part);
  });
}

Tensor Frame::Variant::outside_at(size_t p, const std::vector<Argument>& called_with) const {
  if (from_argument[p] != kNowhere) return part_of(std::get<Tensor>(called_with[from_argument[p]].value));
  return gradient_of[p].defined() ? part_of(chorale::gradient(gradient_of[p])) : outside[p];
}

std::string Frame::Variant::host_mismatch() const {
  for (const graph::Recording::HostRead& read : host) {
    if (*read.cell != read.value) return concat(read.what, " has changed");
  }
  return {};
}

std::vector<std::string> Frame::Variant::guards() const {
  std::vector<std::string> all;
  all.reserve(arguments.size());
  for (const ArgumentGuard& guard : arguments) {
    all.push_back(concat("local ", guard.then.source(), " is ", text_of(guard.then),
                         guard.wants_grad ? " and requires a gradient" : ""));
  }
  for (const CapturedGuard& guard : captured) {
    all.push_back(concat("captured ", guard.layout.dtype, guard.layout.sizes, " stays in its memory"));
  }
  for (const GradientGuard& guard : gradients) {
    all.push_back(concat("captured ", guard.leaf.dtype(), guard.leaf.sizes(),
                         guard.has_one ? " keeps its gradient" : " has no gradient"));
  }
  for (const graph::Recording::HostRead& read : host) {
    std::string guard = concat("host ", read.what, " stays what it is");
    if (std::find(all.begin(), all.end(), guard) == all.end()) all.push_back(std::move(guard));
  }
  all.push_back(concat("global gradients ", modes.grad ? "on" : "off", modes.inference ? ", inference" : "",
                       modes.autocast ? ", autocast" : "", modes.same_bits ? ", same bits" : "", ", new tensors on ",
                       modes.made_on));
  return all;
}

}  // namespace chorale::compiled
