// Masks: the number of elements that hold is found first, chunk by chunk, so that each chunk knows where its results
// go.
#include <algorithm>
#include <numeric>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/index/index.h"
#include "chorale/kernel/cpu/index/modified_copy.h"
#include "chorale/vec/visit_bytes.h"

namespace chorale::kernel::cpu {
namespace {

constexpr int64_t kChunk = 1 << 14;

class Mask {
 public:
  // `mask` is contiguous and bool.
  explicit Mask(const Tensor& mask) : holds_(mask.span<const bool>()) {
    starts_.resize(static_cast<size_t>((size() + kChunk - 1) / kChunk) + 1, 0);
    parallel_for(chunks(), 4, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        const auto* first = holds_.data() + c * kChunk;
        starts_[static_cast<size_t>(c) + 1] =
            std::count(first, holds_.data() + std::min(size(), (c + 1) * kChunk), true);
      }
    });
    std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
  }
  int64_t count() const { return starts_.back(); }

  // Calls f(position, its number among those that hold).
  template <class F>
  void for_each(F&& f) const {
    parallel_for(chunks(), 4, [&](int64_t begin, int64_t end) {
      int64_t number = starts_[static_cast<size_t>(begin)];
      for (int64_t i = begin * kChunk; i < std::min(size(), end * kChunk); ++i) {
        if (holds_[static_cast<size_t>(i)]) f(i, number++);
      }
    });
  }

  // The same for an f that writes something of the position into place `number`: it is also called for positions that
  // do not hold, with the number of the next one that does and will overwrite it. No branch depends on the mask.
  template <class F>
  void write_each(F&& f) const {
    parallel_for(chunks(), 4, [&](int64_t begin, int64_t end) {
      int64_t number = starts_[static_cast<size_t>(begin)];
      const int64_t last = starts_[static_cast<size_t>(end)];
      for (int64_t i = begin * kChunk; number < last; ++i) {
        f(i, number);
        number += holds_[static_cast<size_t>(i)];
      }
    });
  }

 private:
  int64_t size() const { return static_cast<int64_t>(holds_.size()); }
  int64_t chunks() const { return static_cast<int64_t>(starts_.size()) - 1; }

  std::span<const bool> holds_;
  std::vector<int64_t> starts_;  // how many hold before each chunk
};

void check_mask(const char* op, const Tensor& mask) {
  CHORALE_CHECK(mask.dtype() == DType::kBool, "[", op, "] a mask is bool, not ", mask.dtype());
}

Tensor broadcast(const Tensor& x, const Shape& sizes) {
  return contiguous(x.view_as(sizes, broadcast_strides(x.sizes(), x.strides(), sizes), x.offset()));
}

}  // namespace

void masked_select(const KernelArgs& args) {
  check_mask("masked_select", args.in[1]);
  const Shape sizes = broadcast_shapes("masked_select", args.in[0].sizes(), args.in[1].sizes());
  const Tensor x = broadcast(args.in[0], sizes), held = broadcast(args.in[1], sizes);
  const Mask mask(held);
  const Tensor out = args.out[0] = Tensor::empty({mask.count()}, x.dtype());
  vec::visit_bytes(x.elem_bytes(), [&](auto tag) {
    using Unit = typename decltype(tag)::type;
    const auto* from = static_cast<const Unit*>(x.raw());
    auto* to = static_cast<Unit*>(out.raw());
    mask.write_each([&](int64_t position, int64_t number) { to[number] = from[position]; });
  });
}

void masked_scatter(const KernelArgs& args) {
  const Tensor &x = args.in[0], &out = args.out[0];
  const Tensor held = broadcast(args.in[1], x.sizes());
  const Mask mask(held);
  const Tensor source = contiguous(apart(args.in[2], out));
  CHORALE_CHECK(source.elems() >= mask.count(), "[masked_scatter] the mask holds ", mask.count(),
                " times, but there are only ", source.elems(), " elements to place");
  modify(x, out, x.dtype(), [&](const Tensor& work) {
    vec::visit_bytes(x.elem_bytes(), [&](auto tag) {
      using Unit = typename decltype(tag)::type;
      const auto* from = static_cast<const Unit*>(source.raw());
      auto* to = static_cast<Unit*>(work.raw());
      mask.for_each([&](int64_t position, int64_t number) { to[position] = from[number]; });
    });
  });
}

void nonzero(const KernelArgs& args) {
  const Tensor& x = args.in[0];
  const Tensor held = contiguous(x, DType::kBool);
  const Mask mask(held);
  args.out[0] = Tensor::empty({mask.count(), x.dims()}, DType::kI64);
  auto* to = args.out[0].data<int64_t>();
  if (x.dims() == 1) return mask.write_each([&](int64_t position, int64_t number) { to[number] = position; });
  const Shape& sizes = x.sizes();
  mask.for_each([&](int64_t position, int64_t number) {
    for (int64_t d = x.dims(); d-- > 0;) {
      const int64_t size = sizes[static_cast<size_t>(d)];
      to[number * x.dims() + d] = position % size;
      position /= size;
    }
  });
}

}  // namespace chorale::kernel::cpu
