// The loops of scalar_ops.inc over Highway vectors: f32, f64, and f16 and bf16 computed in f32. A source file selects a
// section, includes this and calls add_vector_loops(). Read once per target.
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
#include "chorale/vec/storage-inl.h"
#include "chorale/vec/vocabulary-inl.h"

#include "chorale/vec/scalar_structs-inl.h"  // last: its expressions use the vocabulary

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// One input of a loop: elements of T, or bool for the first input of a masked operation.
template <class T, bool kIsMask>
class Input {
  using Element = std::conditional_t<kIsMask, uint8_t, T>;
  using D = typename Storage<T>::D;

 public:
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
      return Storage<T>::load(data_ + offset);
    }
  }
  HWY_INLINE auto load_first(size_t count) const {
    if constexpr (kIsMask) {
      return mask_from_bytes_n(D(), data_, count);
    } else {
      return Storage<T>::load_first(data_, count);
    }
  }
  HWY_INLINE void advance(size_t count) { data_ += count * step_; }

 private:
  const Element* data_;
  size_t step_ = 1;
};

// The result of a loop: elements of T, or bool for a predicate.
template <class T, bool kIsMask>
struct Output {
  using Element = std::conditional_t<kIsMask, uint8_t, T>;
  using D = typename Storage<T>::D;

  template <class Y>
  static HWY_INLINE void store(Y y, Element* to) {
    if constexpr (kIsMask) {
      store_mask(y, D(), to);
    } else {
      Storage<T>::store(y, to);
    }
  }
  template <class Y>
  static HWY_INLINE void store_first(Y y, Element* to, size_t count) {
    if constexpr (kIsMask) {
      store_mask_n(y, D(), to, count);
    } else {
      Storage<T>::store_first(y, to, count);
    }
  }
};

template <class Op, class T, size_t... kIndex>
HWY_INLINE void vector_loop(std::index_sequence<kIndex...>, const void* const* in, void* out_data, size_t n,
                            const Params& params) {
  using Out = Output<T, Op::kKind == ScalarKind::kPredicate>;
  using Compute = typename Storage<T>::Compute;
  constexpr size_t kLanes = Storage<T>::kLanes;
  // Simple operations wait for memory: more loads in flight help. The others are bound by arithmetic and code size.
  constexpr size_t kVectors = Op::kIsSimple ? 4 : 1;
  constexpr size_t kBlock = kVectors * kLanes;

  std::tuple inputs{Input < T, Op::kKind == ScalarKind::kMasked && kIndex == 0 > (in[kIndex])...};
  HWY_ALIGN T blocks[Op::kInputs][kBlock];
  if (HWY_UNLIKELY(params.broadcast != 0)) {
    (std::get<kIndex>(inputs).repeat_if((params.broadcast >> kIndex & 1) != 0, blocks[kIndex], kBlock), ...);
  }
  auto* out = static_cast<typename Out::Element*>(out_data);
  const typename Storage<T>::D d;
  const auto p0 = hn::Set(d, static_cast<Compute>(params.f[0])), p1 = hn::Set(d, static_cast<Compute>(params.f[1]));
  const auto p2 = hn::Set(d, static_cast<Compute>(params.f[2])), p3 = hn::Set(d, static_cast<Compute>(params.f[3]));

  for (; n >= kBlock; n -= kBlock, out += kBlock) {
    // All loads of a block come before its stores: out may be an input.
    if constexpr (kVectors == 4) {
      const auto y0 = Op::apply(std::get<kIndex>(inputs).load(0)..., p0, p1, p2, p3);
      const auto y1 = Op::apply(std::get<kIndex>(inputs).load(kLanes)..., p0, p1, p2, p3);
      const auto y2 = Op::apply(std::get<kIndex>(inputs).load(2 * kLanes)..., p0, p1, p2, p3);
      const auto y3 = Op::apply(std::get<kIndex>(inputs).load(3 * kLanes)..., p0, p1, p2, p3);
      Out::store(y0, out);
      Out::store(y1, out + kLanes);
      Out::store(y2, out + 2 * kLanes);
      Out::store(y3, out + 3 * kLanes);
    } else {
      Out::store(Op::apply(std::get<kIndex>(inputs).load(0)..., p0, p1, p2, p3), out);
    }
    (std::get<kIndex>(inputs).advance(kBlock), ...);
  }
  while (n > 0) {
    const size_t count = n < kLanes ? n : kLanes;
    Out::store_first(Op::apply(std::get<kIndex>(inputs).load_first(count)..., p0, p1, p2, p3), out, count);
    (std::get<kIndex>(inputs).advance(count), ...);
    n -= count;
    out += count;
  }
}

template <class Op, class T>
void vector_loop_entry(const void* const* in, void* out, int64_t n, const Params& params) {
  vector_loop<Op, T>(std::make_index_sequence<Op::kInputs>(), in, out, static_cast<size_t>(n), params);
}

#ifdef CHORALE_SCALAR_SECTION_ACTIVATION
// gelu of bf16 has a loop of its own, since PyTorch's is faster than the f32 loop's arithmetic is: a coarser function
// (gelu_of_bf16), and elements by pairs, which are two vectors of f32 after a shift and a mask.
inline void gelu_bf16_loop(const void* const* in, void* out_data, int64_t n_elems, const Params& params) {
  const typename Storage<bfloat16>::D d;
  const hn::RebindToUnsigned<decltype(d)> d32;
  const hn::Repartition<uint16_t, decltype(d32)> d16;
  constexpr size_t kLanes = hn::MaxLanes(d16);
  const auto compute = [&](hn::Vec<decltype(d16)> x) HWY_ATTR {
    const auto pair = hn::BitCast(d32, x);
    const F32 even = gelu_of_bf16(hn::BitCast(d, hn::ShiftLeft<16>(pair)));
    const F32 odd = gelu_of_bf16(hn::BitCast(d, hn::And(pair, hn::Set(d32, 0xffff0000u))));
    return hn::OddEven(hn::BitCast(d16, odd), hn::BitCast(d16, hn::ShiftRight<16>(hn::BitCast(d32, even))));
  };
  const auto* x = static_cast<const uint16_t*>(in[0]);
  auto* out = static_cast<uint16_t*>(out_data);
  auto n = static_cast<size_t>(n_elems);
  if (HWY_UNLIKELY(params.broadcast != 0)) {
    const auto y = compute(hn::Set(d16, *x));
    for (; n > 0; n -= HWY_MIN(n, kLanes), out += kLanes) store_n(y, d16, out, HWY_MIN(n, kLanes));
    return;
  }
  for (; n >= kLanes; n -= kLanes, x += kLanes, out += kLanes) hn::StoreU(compute(hn::LoadU(d16, x)), d16, out);
  if (n > 0) store_n(compute(load_n(d16, x, n)), d16, out, n);
}
#endif

template <class Op>
void add_vector_loop(Kernels& kernels, ScalarOp op) {
  if constexpr ((Op::dtype_bits() & domain::F) != 0) {
    kernels.loop(op, DType::kF16) = &vector_loop_entry<Op, float16>;
    kernels.loop(op, DType::kBF16) = &vector_loop_entry<Op, bfloat16>;
    kernels.loop(op, DType::kF32) = &vector_loop_entry<Op, float>;
    kernels.loop(op, DType::kF64) = &vector_loop_entry<Op, double>;
  }
}

// Every operation of the selected section.
static void add_vector_loops(Kernels& kernels) {
#define CHORALE_SCALAR(Name, ...) add_vector_loop<scalar_op::Name>(kernels, ScalarOp::k##Name);
#include "chorale/vec/scalar_ops.inc"
#ifdef CHORALE_SCALAR_SECTION_ACTIVATION
  kernels.loop(ScalarOp::kGeluErf, DType::kBF16) = &gelu_bf16_loop;
#endif
}

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
