#include "chorale/vec/kernels.h"

#include <cstring>
#include <string_view>

#include "chorale/base/cpu.h"
#include "chorale/base/error.h"
#include "chorale/vec/highway_targets.h"
#include "chorale/vec/scalar_reduce.h"
#include "chorale/vec/target.h"
#include "hwy/highway.h"

namespace chorale::vec {
namespace {

// x^p0. The usual exponents have cheap loops of their own; like PyTorch, x^0.5 is sqrt(x), also for -inf and -0.
template <DType kDType>
void pow_scalar(const void* const* in, void* out, int64_t n, const Params& params) {
  const Kernels& k = kernels();
  const double exponent = is_integral(kDType) ? static_cast<double>(params.i[0]) : params.f[0];
  const bool is_real = !is_complex(kDType) || params.f[1] == 0;
  const auto has_root = is_floating(kDType) || is_complex(kDType);
  Loop loop = k.pow_general[static_cast<size_t>(kDType)];
  if (is_real && exponent == 2) loop = k.loop(ScalarOp::kSquare, kDType);
  if (is_real && exponent == 3) loop = k.loop(ScalarOp::kCube, kDType);
  if (is_real && has_root && exponent == 0.5) loop = k.loop(ScalarOp::kSqrt, kDType);
  if (is_real && has_root && exponent == -0.5) loop = k.loop(ScalarOp::kRsqrt, kDType);
  if (is_real && has_root && exponent == -1) loop = k.loop(ScalarOp::kReciprocal, kDType);
  loop(in, out, n, params);
}

template <DType kDType>
void route_pow_scalar(Kernels& k) {
  k.pow_general[static_cast<size_t>(kDType)] = k.loop(ScalarOp::kPowScalar, kDType);
  k.loop(ScalarOp::kPowScalar, kDType) = &pow_scalar<kDType>;
}

Kernels build() {
  Kernels k;
  add_arithmetic(k);
  add_functions(k);
  add_integer(k);
  add_complex(k);
  add_convert(k);
  add_reduce_row(k);
  add_reduce_columns(k);
  add_dot_arg(k);
  add_rows(k);
  // Nothing to compute: two bytes are moved, whatever they mean.
  k.loop(ScalarOp::kWhere, DType::kF16) = k.loop(ScalarOp::kWhere, DType::kBF16) =
      k.loop(ScalarOp::kWhere, DType::kI16);
  route_pow_scalar<DType::kU8>(k);
  route_pow_scalar<DType::kI8>(k);
  route_pow_scalar<DType::kI16>(k);
  route_pow_scalar<DType::kI32>(k);
  route_pow_scalar<DType::kI64>(k);
  route_pow_scalar<DType::kF16>(k);
  route_pow_scalar<DType::kBF16>(k);
  route_pow_scalar<DType::kF32>(k);
  route_pow_scalar<DType::kF64>(k);
  route_pow_scalar<DType::kC64>(k);
  route_pow_scalar<DType::kC128>(k);
  return k;
}

Kernels& table() {
  static Kernels k = build();
  return k;
}

// Best first: a lower bit is a better target.
std::vector<int64_t> supported() {
  std::vector<int64_t> targets = hwy::SupportedAndGeneratedTargets();
  CHORALE_CHECK_STATE(!targets.empty(), "this processor (", cpu_brand(),
                      ") has no SSE4.2; Chorale needs a newer one (Intel since 2008, AMD since 2011)");
  return targets;
}

}  // namespace

const Kernels& kernels() { return table(); }

Loop pointwise_loop(ScalarOp op, DType dtype) { return kernels().loop(op, dtype); }

Convert convert_loop(DType from, DType to) {
  return kernels().convert[static_cast<size_t>(from)][static_cast<size_t>(to)];
}

ReduceRow reduce_row(ReduceOp op, DType in) {
  return kernels().reduce_row[static_cast<size_t>(op)][static_cast<size_t>(in)];
}
ReduceColumns reduce_columns(ReduceOp op, DType in) {
  return kernels().reduce_columns[static_cast<size_t>(op)][static_cast<size_t>(in)];
}
ReduceCombine reduce_combine(ReduceOp op, DType in) {
  return kernels().reduce_combine[static_cast<size_t>(op)][static_cast<size_t>(in)];
}

ArgReduce argmax(DType in) { return kernels().argmax[static_cast<size_t>(in)]; }
ArgReduce argmin(DType in) { return kernels().argmin[static_cast<size_t>(in)]; }
Dot dot(DType dtype) { return kernels().dot[static_cast<size_t>(dtype)]; }

namespace {
template <class T>
void add_scaled(double alpha, const T* x, T* y, int64_t n) {
  Params params;
  params.f[0] = alpha;
  const void* in[2] = {y, x};
  pointwise_loop(ScalarOp::kAddScaled, dtype_of<T>)(in, y, n, params);
}
}  // namespace

void axpy(float alpha, const float* x, float* y, int64_t n) { add_scaled(static_cast<double>(alpha), x, y, n); }
void axpy(double alpha, const double* x, double* y, int64_t n) { add_scaled(alpha, x, y, n); }

DType accumulator_of(ReduceOp op, DType in) { return accumulator_dtype(op, in); }

namespace {
template <ReduceOp kOp>
void write_identity(DType in, void* acc) {
  visit_dtype(in, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (is_defined(kOp, dtype_of<T>)) {
      const auto identity = ScalarReduce<kOp, T>::identity();
      std::memcpy(acc, &identity, sizeof(identity));
    }
  });
}
}  // namespace

void reduce_identity(ReduceOp op, DType in, void* acc) {
  switch (op) {
#define CHORALE_CASE(name) \
  case ReduceOp::name:     \
    return write_identity<ReduceOp::name>(in, acc);
    CHORALE_FOR_EACH_REDUCE_OP(CHORALE_CASE)
#undef CHORALE_CASE
  }
}

const char* target_name() { return hwy::TargetName(supported().front()); }

std::vector<const char*> available_targets() {
  std::vector<const char*> names;
  for (int64_t target : supported()) names.push_back(hwy::TargetName(target));
  return names;
}

void force_target(const char* name) {
  hwy::SetSupportedTargetsForTest(0);
  if (name != nullptr) {
    int64_t chosen = 0;
    for (int64_t target : supported()) {
      if (std::string_view(name) == hwy::TargetName(target)) chosen = target;
    }
    CHORALE_CHECK(chosen != 0, "[force_target] no vector target ", name, " here; the best one is ", target_name());
    hwy::SetSupportedTargetsForTest(chosen);
  }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  table() = build();
}

}  // namespace chorale::vec
