#include "chorale/kernel/cpu/creation.h"

#include <cstring>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/creation_attrs.h"
#include "chorale/tensor/strided.h"
#include "chorale/vec/strided_copy.h"

namespace chorale::kernel::cpu {
namespace {

constexpr int64_t kGrainElems = 32768;

// Calls f(T* out, i) for every element of a contiguous tensor; f writes out[i].
template <class F>
void for_each_element(const Tensor& out, F&& f) {
  visit_dtype(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* data = static_cast<T*>(out.raw());
    parallel_for(out.elems(), kGrainElems, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) data[i] = f(base::TypeTag<T>{}, i);
    });
  });
}

}  // namespace

void full(const KernelArgs& args) {
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const Scalar& value = args.attrs.get<FullAttrs>().value;
  visit_dtype(out.dtype(), [&](auto tag) {
    const auto element = value.to<typename decltype(tag)::type>();
    vec::fill_strided(&element, strided(out));
  });
}

void arange(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<RangeAttrs>();
  if (is_integral(args.out[0].dtype()) && attrs.start.kind() <= Scalar::Kind::kInt &&
      attrs.step.kind() <= Scalar::Kind::kInt) {
    for_each_element(args.out[0], [&](auto tag, int64_t i) {
      return Scalar(attrs.start.integer() + i * attrs.step.integer()).to<typename decltype(tag)::type>();
    });
    return;
  }
  for_each_element(args.out[0], [&](auto tag, int64_t i) {
    return Scalar(attrs.start.real() + static_cast<double>(i) * attrs.step.real()).to<typename decltype(tag)::type>();
  });
}

void linspace(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<LinspaceAttrs>();
  const double step = attrs.count > 1 ? (attrs.end - attrs.start) / static_cast<double>(attrs.count - 1) : 0;
  for_each_element(args.out[0], [&](auto tag, int64_t i) {
    // Counted from both ends, so that the last value is exactly `end`.
    const double value = i < attrs.count / 2 || attrs.count == 1
                             ? attrs.start + static_cast<double>(i) * step
                             : attrs.end - static_cast<double>(attrs.count - 1 - i) * step;
    return Scalar(value).to<typename decltype(tag)::type>();
  });
}

void eye(const KernelArgs& args) {
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  std::memset(out.raw(), 0, static_cast<size_t>(out.elems()) * out.elem_bytes());
  visit_dtype(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* data = static_cast<T*>(out.raw());
    for (int64_t i = 0; i < std::min(out.size(0), out.size(1)); ++i) data[i * out.size(1) + i] = Scalar(1).to<T>();
  });
}

}  // namespace chorale::kernel::cpu
