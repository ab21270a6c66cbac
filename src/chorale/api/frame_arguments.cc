// Compiled functions: what they are called with.
#include "chorale/api/frame.h"
#include "chorale/autograd/autograd.h"
#include "chorale/base/error.h"
#include "chorale/op/collective.h"

namespace chorale::compiled {

using graph::Recording;

const Argument* argument_of(const std::vector<Argument>& arguments, const Tensor& handle) {
  for (const Argument& one : arguments) {
    const auto* x = std::get_if<Tensor>(&one.value);
    if (x && part_of(*x).is(handle)) return &one;
  }
  return nullptr;
}

void check_dynamic_dims(const CompileOptions& options, const std::vector<Argument>& arguments) {
  for (const DynamicDim& mark : options.dynamic_dims) {
    const Tensor* x = mark.argument < arguments.size() ? std::get_if<Tensor>(&arguments[mark.argument].value) : nullptr;
    CHORALE_CHECK(x, "[compile] dynamic_dims: argument ", mark.argument, " is no tensor; there are ", arguments.size(),
                  " arguments, and each tensor in a list counts as one");
    if (x->defined()) normalize_dim("compile: dynamic_dims", mark.dim, x->dims());
  }
}
void wait_for_arguments(const std::vector<Argument>& arguments) {
  for (const Argument& argument : arguments) {
    const auto* x = std::get_if<Tensor>(&argument.value);
    if (x && x->defined() && x->is_sharded()) sharding::local_of(*x);
    if (!x || !is_pending(*x)) continue;
    const NoGrad quiet;
    const Tensor there = wait_for(*x);
    x->impl()->extension = nullptr;
    x->impl()->data = there.impl()->data;
  }
}

Mark mark_of(const CompileOptions& options, size_t argument, int64_t dim, int64_t dims) {
  for (const DynamicDim& mark : options.dynamic_dims) {
    if (mark.argument == argument && (mark.dim < 0 ? mark.dim + dims : mark.dim) == dim) return Mark::kOwn;
  }
  return options.dynamic == Dynamic::kAlways ? Mark::kShared : Mark::kNone;
}

std::vector<SizeSource> sources_of(const Recording& recording, const Segment& segment,
                                   const std::vector<Argument>& arguments, const CompileOptions& options) {
  std::vector<SizeSource> sources;
  const std::vector<SegmentKey::Outside>& outside = segment.key().outside;
  for (size_t p = 0; p < outside.size(); ++p) {
    const Tensor& handle = recording.tensors()[outside[p].tensor].handle;
    const Argument* argument = argument_of(arguments, handle);
    // Sizes of parts follow from more than the caller's sizes: they are what they are.
    const bool is_argument = argument != nullptr && !std::get<Tensor>(argument->value).is_sharded();
    const auto number = is_argument ? static_cast<size_t>(argument - arguments.data()) : arguments.size();
    const auto dims = static_cast<int64_t>(outside[p].layout.sizes.size());
    for (int64_t d = 0; d < dims; ++d) {
      const Mark mark = is_argument ? mark_of(options, number, d, dims) : Mark::kNone;
      sources.push_back({concat(is_argument ? argument->source() : concat("input ", p), ".size(", d, ")"),
                         outside[p].layout.sizes[static_cast<size_t>(d)], mark, is_argument ? number : SIZE_MAX, d});
    }
  }
  for (const Argument& argument : arguments) {
    if (const auto* number = std::get_if<int64_t>(&argument.value)) {
      sources.push_back(
          {argument.source(), *number, options.dynamic == Dynamic::kAlways ? Mark::kShared : Mark::kNone, SIZE_MAX, 0});
    }
  }
  for (size_t i = 0; i < recording.late_sizes().size(); ++i) {
    sources.push_back({concat("late ", i), recording.late_sizes()[i].stand_in, Mark::kOwn, SIZE_MAX, 0, true});
  }
  return sources;
}

}  // namespace chorale::compiled
