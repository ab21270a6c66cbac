// The loops of scalar_ops.inc over single elements (integers, bool, complex). A source file selects sections, includes
// this and calls add_scalar_loops<T>(). Read once per target.
#if defined(CHORALE_VEC_POINTWISE_SCALAR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CHORALE_VEC_POINTWISE_SCALAR_INL_H_
#undef CHORALE_VEC_POINTWISE_SCALAR_INL_H_
#else
#define CHORALE_VEC_POINTWISE_SCALAR_INL_H_
#endif

#include <tuple>
#include <utility>

#include "hwy/highway.h"

#include "chorale/vec/kernels.h"
#include "chorale/vec/lanes-inl.h"
#include "chorale/vec/scalar_vocabulary-inl.h"

#include "chorale/vec/scalar_structs-inl.h"  // last: its expressions use the vocabulary

HWY_BEFORE_NAMESPACE();
namespace chorale::vec::HWY_NAMESPACE {

template <class T>
HWY_INLINE One<T> parameter(const Params& params, size_t k) {
  if constexpr (kIsComplex<T>) {
    using Real = typename T::value_type;
    return k < 2 ? One<T>{T(static_cast<Real>(params.f[2 * k]), static_cast<Real>(params.f[2 * k + 1]))} : One<T>{};
  } else if constexpr (std::is_same_v<T, bool>) {
    return One<T>{static_cast<uint8_t>(params.i[k] != 0)};
  } else {
    return One<T>{static_cast<T>(params.i[k])};
  }
}

// One input of a loop: elements of T, or bool for the first input of a masked operation.
template <class T, bool kIsMask>
class ScalarInput {
  using Element = std::conditional_t<kIsMask, uint8_t, Stored<T>>;

 public:
  HWY_INLINE explicit ScalarInput(const void* data) : data_(static_cast<const Element*>(data)) {}
  HWY_INLINE auto load(size_t i) const {
    if constexpr (kIsMask) {
      return data_[i] != 0;
    } else {
      return One<T>{data_[i]};
    }
  }

 private:
  const Element* data_;
};

HWY_INLINE uint8_t unwrap(bool x) { return x ? 1 : 0; }
HWY_INLINE float unwrap(float x) { return x; }
HWY_INLINE double unwrap(double x) { return x; }
template <class T>
HWY_INLINE Stored<T> unwrap(One<T> x) {
  return x.value;
}

template <class Op, class T, size_t... kIndex>
HWY_NOINLINE void scalar_loop(std::index_sequence<kIndex...>, const void* const* in, void* out_data, size_t n,
                              const Params& params) {
  const std::tuple inputs{ScalarInput < T, Op::kKind == ScalarKind::kMasked && kIndex == 0 > (in[kIndex])...};
  const One<T> p0 = parameter<T>(params, 0), p1 = parameter<T>(params, 1);
  const One<T> p2 = parameter<T>(params, 2), p3 = parameter<T>(params, 3);
  using Out = decltype(unwrap(Op::apply(std::get<kIndex>(inputs).load(0)..., p0, p1, p2, p3)));
  Out* out = static_cast<Out*>(out_data);
  CHORALE_IVDEP
  for (size_t i = 0; i < n; ++i) out[i] = unwrap(Op::apply(std::get<kIndex>(inputs).load(i)..., p0, p1, p2, p3));
}

// Repeated elements are spread over blocks, and the loop then runs over pieces of that size.
template <class Op, class T>
HWY_NOINLINE void broadcasting_loop(const void* const* in, void* out, size_t n, const Params& params) {
  constexpr size_t kBlock = 256;
  constexpr size_t kOutSize = Op::kKind == ScalarKind::kPredicate ? 1
                              : Op::kKind == ScalarKind::kToReal  ? sizeof(typename RealOf<T>::type)
                                                                  : sizeof(T);
  alignas(64) std::byte blocks[Op::kInputs][kBlock * sizeof(T)];
  const std::byte* piece[Op::kInputs];
  size_t step[Op::kInputs];
  for (size_t k = 0; k < Op::kInputs; ++k) {
    const size_t size = Op::kKind == ScalarKind::kMasked && k == 0 ? 1 : sizeof(T);
    if ((params.broadcast >> k & 1) != 0) {
      fill(blocks[k], in[k], size, kBlock);
      piece[k] = blocks[k];
      step[k] = 0;
    } else {
      piece[k] = static_cast<const std::byte*>(in[k]);
      step[k] = kBlock * size;
    }
  }
  for (size_t i = 0; i < n; i += kBlock) {
    const void* inputs[Op::kInputs];
    for (size_t k = 0; k < Op::kInputs; ++k) {
      inputs[k] = piece[k];
      piece[k] += step[k];
    }
    scalar_loop<Op, T>(std::make_index_sequence<Op::kInputs>(), inputs, static_cast<std::byte*>(out) + i * kOutSize,
                       n - i < kBlock ? n - i : kBlock, params);
  }
}

template <class Op, class T>
void scalar_loop_entry(const void* const* in, void* out, int64_t n, const Params& params) {
  if (HWY_LIKELY(params.broadcast == 0)) {
    scalar_loop<Op, T>(std::make_index_sequence<Op::kInputs>(), in, out, static_cast<size_t>(n), params);
  } else {
    broadcasting_loop<Op, T>(in, out, static_cast<size_t>(n), params);
  }
}

template <class Op, class T>
void add_scalar_loop(Kernels& kernels, ScalarOp op) {
  if constexpr ((Op::dtype_bits() & domain::of(dtype_of<T>)) != 0) {
    kernels.loop(op, dtype_of<T>) = &scalar_loop_entry<Op, T>;
  }
}

// Every operation of the selected sections.
template <class T>
static void add_scalar_loops(Kernels& kernels) {
#define CHORALE_SCALAR(Name, ...) add_scalar_loop<scalar_op::Name, T>(kernels, ScalarOp::k##Name);
#include "chorale/vec/scalar_ops.inc"
}

}  // namespace chorale::vec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
