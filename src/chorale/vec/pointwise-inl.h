// The loops of scalar_ops.inc over Highway vectors (f32, f64). A source file selects a section, includes this and calls
// add_vector_loops(). Read once per target.
#if defined(CHORALE_VEC_POINTWISE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CHORALE_VEC_POINTWISE_INL_H_
#undef CHORALE_VEC_POINTWISE_INL_H_
#else
#define CHORALE_VEC_POINTWISE_INL_H_
#endif

#include <tuple>
#include <utility>

#include "hwy/highway.h"

#include "chorale/vec/kernels.h"
#include "chorale/vec/lanes-inl.h"
#include "chorale/vec/vocabulary-inl.h"

#include "chorale/vec/scalar_structs-inl.h"  // last: its expressions use the vocabulary

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// One input of a loop: values of T, or bool for the first input of a masked operation.
template <class T, bool kIsMask>
class Input {
  using D = hn::ScalableTag<T>;

 public:
  using Element = std::conditional_t<kIsMask, uint8_t, T>;

  HWY_INLINE explicit Input(const void* data) : data_(static_cast<const Element*>(data)) {}
  // For a broadcast input the element stands for n: spread over one block, and the pointer then stays there.
  HWY_INLINE void repeat_if(bool broadcast, void* block, size_t size) {
    if (!broadcast) return;
    Element* elements = static_cast<Element*>(block);
    for (size_t i = 0; i < size; ++i) elements[i] = *data_;
    data_ = elements;
    step_ = 0;
  }
  HWY_INLINE auto load(size_t offset) const {
    if constexpr (kIsMask) {
      return mask_from_bytes(D(), data_ + offset);
    } else {
      return hn::LoadU(D(), data_ + offset);
    }
  }
  HWY_INLINE auto load_first(size_t count) const {
    if constexpr (kIsMask) {
      return mask_from_bytes_n(D(), data_, count);
    } else {
      return load_n(D(), data_, count);
    }
  }
  HWY_INLINE void advance(size_t count) { data_ += count * step_; }

 private:
  const Element* data_;
  size_t step_ = 1;
};

template <class Op, class T, size_t... kIndex>
HWY_INLINE void vector_loop(std::index_sequence<kIndex...>, const void* const* in, void* out_data, size_t n,
                            const Params& params) {
  const hn::ScalableTag<T> d;
  constexpr size_t kLanes = hn::MaxLanes(d);
  // Simple operations wait for memory: more loads in flight help. The others are bound by arithmetic and code size.
  constexpr size_t kVectors = Op::kIsSimple ? 4 : 1;
  constexpr size_t kBlock = kVectors * kLanes;
  using Out = std::conditional_t<Op::kKind == ScalarKind::kPredicate, uint8_t, T>;

  std::tuple inputs{Input < T, Op::kKind == ScalarKind::kMasked && kIndex == 0 > (in[kIndex])...};
  HWY_ALIGN T blocks[Op::kInputs][kBlock];
  if (HWY_UNLIKELY(params.broadcast != 0)) {
    (std::get<kIndex>(inputs).repeat_if((params.broadcast >> kIndex & 1) != 0, blocks[kIndex], kBlock), ...);
  }
  Out* out = static_cast<Out*>(out_data);
  const auto p0 = hn::Set(d, static_cast<T>(params.f[0])), p1 = hn::Set(d, static_cast<T>(params.f[1]));
  const auto p2 = hn::Set(d, static_cast<T>(params.f[2])), p3 = hn::Set(d, static_cast<T>(params.f[3]));

  for (; n >= kBlock; n -= kBlock, out += kBlock) {
    // All loads of a block come before its stores: out may be an input.
    if constexpr (kVectors == 4) {
      const auto y0 = Op::apply(std::get<kIndex>(inputs).load(0)..., p0, p1, p2, p3);
      const auto y1 = Op::apply(std::get<kIndex>(inputs).load(kLanes)..., p0, p1, p2, p3);
      const auto y2 = Op::apply(std::get<kIndex>(inputs).load(2 * kLanes)..., p0, p1, p2, p3);
      const auto y3 = Op::apply(std::get<kIndex>(inputs).load(3 * kLanes)..., p0, p1, p2, p3);
      store(y0, d, out);
      store(y1, d, out + kLanes);
      store(y2, d, out + 2 * kLanes);
      store(y3, d, out + 3 * kLanes);
    } else {
      store(Op::apply(std::get<kIndex>(inputs).load(0)..., p0, p1, p2, p3), d, out);
    }
    (std::get<kIndex>(inputs).advance(kBlock), ...);
  }
  while (n > 0) {
    const size_t count = n < kLanes ? n : kLanes;
    store_n(Op::apply(std::get<kIndex>(inputs).load_first(count)..., p0, p1, p2, p3), d, out, count);
    (std::get<kIndex>(inputs).advance(count), ...);
    n -= count;
    out += count;
  }
}

template <class Op, class T>
void vector_loop_entry(const void* const* in, void* out, int64_t n, const Params& params) {
  vector_loop<Op, T>(std::make_index_sequence<Op::kInputs>(), in, out, static_cast<size_t>(n), params);
}

template <class Op>
void add_vector_loop(Kernels& kernels, ScalarOp op) {
  if constexpr ((Op::dtype_bits() & domain::F) != 0) {
    kernels.loop(op, DType::kF32) = &vector_loop_entry<Op, float>;
    kernels.loop(op, DType::kF64) = &vector_loop_entry<Op, double>;
  }
}

// Every operation of the selected section.
static void add_vector_loops(Kernels& kernels) {
#define CHORALE_SCALAR(Name, ...) add_vector_loop<scalar_op::Name>(kernels, ScalarOp::k##Name);
#include "chorale/vec/scalar_ops.inc"
}

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
