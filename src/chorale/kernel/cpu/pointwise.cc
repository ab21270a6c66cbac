#include "chorale/kernel/cpu/pointwise.h"

#include <algorithm>
#include <cstring>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/numbers.h"
#include "chorale/tensor/strided.h"
#include "chorale/vec/loops.h"

namespace chorale::kernel::cpu {
namespace {

using vec::StridedOperand;
using vec::StridedSpace;

using vec::ScalarKind;
using vec::ScalarOp;

constexpr size_t kMaxInputs = 4;
// Elements that go through buffers at a time: those of a three-input f32 loop fill two thirds of a first-level cache.
constexpr int64_t kChunk = 1024;
// Below this much work (10 us of the cheapest loops) another thread costs more than it saves: waking it takes as long
// where another program has its core.
constexpr int64_t kGrain = 128 * 1024;
// Rows at least this long go to the loop one by one; shorter ones are collected to chunks.
constexpr int64_t kLongRow = 32;
// A transposed input of at least this many elements is first copied, square by square, into the output's order: read
// along the output it would touch a cache line for each element.
constexpr int64_t kTransposeFirst = 16 * 1024;

// The bits of a value in a 16-bit floating type.
int64_t half_bits(double value, DType dtype) {
  const auto single = static_cast<float>(value);
  return dtype == DType::kF16 ? float16(single).bits : bfloat16(single).bits;
}

vec::Params params_of(const Attrs& attrs, DType loop) {
  return kernel::params_of<vec::Params>(attrs, loop, [loop](const Scalar& number) {
    return is_half(loop) ? half_bits(number.real(), loop) : number.integer();
  });
}

// A call, ready to run.
struct Call {
  vec::Loop loop = nullptr;
  vec::Params params;
  size_t inputs = 0;
  DType in[kMaxInputs];  // what the loop reads
  DType out;             // and writes
};

// Every operand contiguous and of the loop's dtype, or one element: no bookkeeping at all. Returns whether it was so.
bool run_linear(Call& call, const KernelArgs& args) {
  const Tensor& out = args.out[0];
  if (!out.is_contiguous() || out.dtype() != call.out) return false;
  const int64_t n = out.elems();
  const std::byte* in[kMaxInputs];
  uint32_t broadcast = 0;
  for (size_t k = 0; k < call.inputs; ++k) {
    const Tensor& x = args.in[k];
    if (!x.is_contiguous() || x.dtype() != call.in[k]) return false;
    if (x.elems() != n) {
      if (x.elems() != 1) return false;
      broadcast |= 1u << k;
    }
    in[k] = static_cast<const std::byte*>(x.raw());
  }
  call.params.broadcast = broadcast;
  if (n < 2 * kGrain) {
    call.loop(reinterpret_cast<const void* const*>(in), out.raw(), n, call.params);
    return true;
  }
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
    const void* piece[kMaxInputs];
    for (size_t k = 0; k < call.inputs; ++k) {
      const int64_t step = broadcast >> k & 1u ? 0 : static_cast<int64_t>(size_of(call.in[k]));
      piece[k] = in[k] + begin * step;
    }
    call.loop(piece, static_cast<std::byte*>(out.raw()) + begin * static_cast<int64_t>(size_of(call.out)), end - begin,
              call.params);
  });
  return true;
}

// Runs a call over a space of any strides and dtypes. Operand k + 1 of the space is input k.
class Strided {
 public:
  Strided(const Call& call, const StridedSpace& space) : call_(call), space_(space) {
    for (size_t k = 0; k < call.inputs; ++k) {
      if (!space[k + 1].constant) continue;
      convert(space[k + 1].data, space[k + 1].dtype, constants_[k].bytes, call.in[k], 1);
    }
  }

  void run() const {
    if (rows_are_direct()) {
      parallel_for(space_.elems(), kGrain, [&](int64_t begin, int64_t end) { run_rows(begin, end); });
    } else {
      // Whole rows in a chunk where they fit, so that an input that all rows share is the same for every chunk.
      const int64_t inner = space_.inner(), chunk = inner < kChunk ? kChunk / inner * inner : kChunk;
      const int64_t chunks = (space_.elems() + chunk - 1) / chunk;
      parallel_for(chunks, kGrain / chunk, [&](int64_t begin, int64_t end) {
        run_chunks(begin * chunk, std::min(end * chunk, space_.elems()), chunk);
      });
    }
  }

 private:
  struct alignas(64) Buffer {
    std::byte bytes[kChunk * 16];
  };
  struct Buffers {
    Buffer raw;  // gathered and not yet converted, or converted and not yet scattered
    Buffer in[kMaxInputs];
    Buffer out;
  };
  struct alignas(16) Constant {
    std::byte bytes[16];
  };

  static void convert(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t n) {
    if (from_dtype == to_dtype) {
      std::memcpy(to, from, static_cast<size_t>(n) * size_of(to_dtype));
    } else {
      vec::convert_loop(from_dtype, to_dtype)(from, to, n);
    }
  }

  bool is_repeated_along_rows(const StridedOperand& operand) const { return operand.inner_stride(space_.dims()) == 0; }
  bool is_shared_by_rows(const StridedOperand& operand) const {
    return std::all_of(operand.strides, operand.strides + space_.dims() - 1,
                       [](int64_t stride) { return stride == 0; });
  }

  // Can the loop run on the operands' own memory, row by row, and is a row worth a call?
  bool rows_are_direct() const {
    if (space_.dims() > 1 && space_.inner() < kLongRow) return false;
    const auto is_direct = [&](const StridedOperand& operand, DType loop) {
      return operand.dtype == loop && operand.inner_stride(space_.dims()) == static_cast<int64_t>(operand.elem_bytes);
    };
    bool direct = is_direct(space_[0], call_.out);
    for (size_t k = 0; k < call_.inputs; ++k) {
      const StridedOperand& x = space_[k + 1];
      direct &= x.constant || is_direct(x, call_.in[k]) || (x.dtype == call_.in[k] && is_repeated_along_rows(x));
    }
    return direct;
  }

  void run_rows(int64_t begin, int64_t end) const {
    vec::Params params = call_.params;
    for (size_t k = 0; k < call_.inputs; ++k) params.broadcast |= is_repeated_along_rows(space_[k + 1]) ? 1u << k : 0;
    space_.for_each_row(begin, end, [&](std::byte* const* data, int64_t n) {
      const void* in[kMaxInputs];
      for (size_t k = 0; k < call_.inputs; ++k) in[k] = space_[k + 1].constant ? constants_[k].bytes : data[k + 1];
      call_.loop(in, data[0], n, params);
    });
  }

  void run_chunks(int64_t begin, int64_t end, int64_t chunk) const {
    Buffers buffers;
    vec::Params params = call_.params;
    bool fetched_once[kMaxInputs];
    for (size_t k = 0; k < call_.inputs; ++k) {
      params.broadcast |= space_[k + 1].constant ? 1u << k : 0;
      fetched_once[k] = is_shared_by_rows(space_[k + 1]) && chunk % space_.inner() == 0;
    }
    const void* in[kMaxInputs];
    for (int64_t at = begin; at < end; at += chunk) {
      const int64_t n = std::min(chunk, end - at);
      for (size_t k = 0; k < call_.inputs; ++k) {
        if (at == begin || !fetched_once[k]) in[k] = fetch(k, at, n, buffers);
      }
      compute(in, at, n, params, buffers);
    }
  }

  // The elements of an input as the loop wants them: in place, or in its buffer.
  const std::byte* fetch(size_t k, int64_t at, int64_t n, Buffers& buffers) const {
    const StridedOperand& x = space_[k + 1];
    const bool same = x.dtype == call_.in[k];
    if (x.constant) return constants_[k].bytes;
    const std::byte* source = x.data + at * static_cast<int64_t>(x.elem_bytes);
    if (!x.linear) {
      std::byte* gathered = same ? buffers.in[k].bytes : buffers.raw.bytes;
      space_.gather(k + 1, at, n, gathered);
      source = gathered;
    }
    if (same) return source;
    convert(source, x.dtype, buffers.in[k].bytes, call_.in[k], n);
    return buffers.in[k].bytes;
  }

  // Runs the loop and puts its results where they belong.
  void compute(const void* const* in, int64_t at, int64_t n, const vec::Params& params, Buffers& buffers) const {
    const StridedOperand& y = space_[0];
    const bool same = y.dtype == call_.out;
    std::byte* target = y.linear ? y.data + at * static_cast<int64_t>(y.elem_bytes) : nullptr;
    std::byte* result = target && same ? target : buffers.out.bytes;
    call_.loop(in, result, n, params);
    if (!same) {
      std::byte* converted = target ? target : buffers.raw.bytes;
      convert(result, call_.out, converted, y.dtype, n);
      result = converted;
    }
    if (!target) space_.scatter(0, at, n, result);
  }

  const Call& call_;
  const StridedSpace& space_;
  Constant constants_[kMaxInputs];
};

// The name of an operation that is not defined for an integer and zero; null for any other.
const char* division_name(ScalarOp op) {
  return op == ScalarOp::kFloorDivide   ? "floor_divide"
         : op == ScalarOp::kTruncDivide ? "trunc_divide"
         : op == ScalarOp::kRemainder   ? "remainder"
                                        : nullptr;
}

// Nothing may be written before every divisor has been seen.
void check_divisor(const char* name, const Tensor& divisor) {
  const Tensor y = contiguous(divisor);
  visit_dtype(y.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_integral_v<T>) {
      const auto elements = y.span<T>();
      const auto zero = std::find(elements.begin(), elements.end(), T(0));
      CHORALE_CHECK(zero == elements.end(), "[", name, "] integer division by zero: element ", zero - elements.begin(),
                    " of the divisor of shape ", y.sizes(), " is 0");
    }
  });
}

// Is the output read along its memory, but this input across?
bool is_transposed(const Tensor& x, const Tensor& out) {
  if (x.elems() < kTransposeFirst || x.is_contiguous() || !out.is_contiguous()) return false;
  // The fastest dimension of x is not that of the output.
  const Strides& strides = x.strides();
  const bool reads_across = strides.back() != 1 && strides.back() != 0 && x.sizes().back() > 1;
  return reads_across && std::any_of(strides.begin(), strides.end() - 1, [](int64_t stride) { return stride == 1; });
}

}  // namespace

void pointwise(const KernelArgs& args) {
  const Pointwise& what = *args.pointwise;
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const vec::ScalarInfo& info = vec::info(what.op);
  const DType common = common_dtype(what, args.in, args.attrs);
  DType loop;
  const bool known = loop_dtype(what.op, common, loop);
  if (what.op == vec::ScalarOp::kGeluErf && common == DType::kBF16) loop = common;  // a loop of its own, without casts
  if (const char* name = division_name(what.op); name && is_integral(loop)) check_divisor(name, args.in[1]);

  Call call;
  call.loop = vec::pointwise_loop(what.op, loop);
  CHORALE_INVARIANT(known && call.loop, info.name, " has no loop for ", common);
  call.params = params_of(args.attrs, loop);
  call.inputs = static_cast<size_t>(info.input_count);
  for (size_t k = 0; k < call.inputs; ++k) call.in[k] = loop;
  if (info.kind == ScalarKind::kMasked) call.in[0] = DType::kBool;
  call.out = result_dtype(info.kind, loop);
  if (run_linear(call, args)) return;

  SmallVector<Tensor, kMaxInputs> in;
  for (const Tensor& x : args.in) in.push_back(is_transposed(x, out) ? contiguous(x) : x);
  vec::StridedView views[kMaxInputs];
  for (size_t k = 0; k < in.size(); ++k) views[k] = strided(in[k]);
  const StridedSpace space(strided(out), {views, in.size()});
  Strided(call, space).run();
}

}  // namespace chorale::kernel::cpu
