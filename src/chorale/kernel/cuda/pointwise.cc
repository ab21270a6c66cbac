#include "chorale/kernel/cuda/pointwise.h"

#include <algorithm>
#include <cstdio>

#include "chorale/device/cuda/fault.h"
#include "chorale/device/cuda/space.h"
#include "chorale/device/runtime.h"
#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/cuda/reduce.h"
#include "chorale/kernel/cuda/wide_rows.h"
#include "chorale/kernel/element_loop.h"
#include "chorale/kernel/numbers.h"
#include "chorale/kernel/pointwise.h"
#include "chorale/tensor/strided.h"
#include "chorale/vec/expression.h"

namespace chorale::cuda {
extern const std::string_view kVocabularyCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::blocks_for;
using chorale::cuda::find_kernel;
using chorale::cuda::KernelText;
using chorale::cuda::launch;
using chorale::cuda::Space;
using chorale::cuda::type_in_text;

constexpr size_t kMaxInputs = 4;

// What kernels see (Params in vocabulary.cu).
struct Params {
  double f[8] = {};
  int64_t i[8] = {};
  chorale::cuda::Fault* fault = nullptr;
  int64_t row = 0;
};

Params params_of(const Attrs& attrs, DType loop) {
  return kernel::params_of<Params>(attrs, loop, [](const Scalar& number) { return number.integer(); });
}

// What a kernel is made of: all that its text depends on.
struct Call {
  const vec::Expression* expression;  // null: the input itself
  std::string name;
  DType loop, out_loop;
  size_t inputs;
  DType in_loop[kMaxInputs];
  // How operands lie in memory; operand 0 is the result.
  DType memory[kMaxInputs + 1];
  bool linear;                  // every operand lies in order, or is one element
  unsigned constants;           // which are one element, as bits
  int width;                    // elements that a thread moves at once
  bool checks_divisor = false;  // integers are not divided by zero
};

bool divides(vec::ScalarOp op) {
  return op == vec::ScalarOp::kFloorDivide || op == vec::ScalarOp::kTruncDivide || op == vec::ScalarOp::kRemainder;
}

std::string key_of(const Call& call) {
  std::string key = "pointwise ";
  key += call.name;
  key += ' ';
  key += type_in_text(call.loop);
  for (size_t k = 0; k <= call.inputs; ++k) {
    key += ' ';
    key += type_in_text(call.memory[k]);
  }
  key += call.linear ? 'l' : 's';
  key += static_cast<char>('a' + call.width);
  key += static_cast<char>('a' + call.constants);
  return key;
}

std::string text_of(const vec::Expression& expression, bool narrow) {
  std::string body;
  const auto term_name = [&](size_t at) {
    const vec::Term& term = expression.terms[at];
    return term.kind == vec::Term::Kind::kInput ? concat("x", int{term.index}) : concat("t", at);
  };
  for (size_t at = 0; at < expression.terms.size(); ++at) {
    const vec::Term& term = expression.terms[at];
    if (term.kind == vec::Term::Kind::kInput) continue;
    body += concat("  const auto t", at, " = ");
    if (term.kind == vec::Term::Kind::kParam) {
      body += concat("parameter<L>(p, ", int{term.index}, ");\n");
    } else if (term.kind == vec::Term::Kind::kNumber) {
      char number[40];
      std::snprintf(number, sizeof(number), "%.17g", term.number);
      body += concat("literal<L>(", number, ");\n");
    } else {
      body += concat("v::", term.function, narrow && has_narrow_form(term.function) ? "_16(" : "(");
      for (size_t i = 0; i < term.arg_count; ++i) body += (i == 0 ? "" : ", ") + term_name(term.args[i]);
      body += ");\n";
    }
  }
  return body + "  return " + term_name(expression.terms.size() - 1) + ";\n";
}

KernelText text_of(const Call& call) {
  std::string text(chorale::cuda::prelude());
  text += chorale::cuda::kVocabularyCu;
  text += concat("typedef ", type_in_text(call.loop), " L;\n");
  std::string parameters, loads, row_picks, packs, picks;
  for (size_t k = 0; k < call.inputs; ++k) {
    const char* const memory = type_in_text(call.memory[k + 1]);
    const char* const loop = type_in_text(call.in_loop[k]);
    parameters += concat(", const ", loop, " x", k);
    // Along a row an operand is read as a pack, or its one element is repeated.
    if (call.constants >> k & 1u) {
      loads +=
          concat("    const ", memory, " r", k, " = *(const ", memory, "*)(s.data[", k + 1, "] + at[", k + 1, "]);\n");
      row_picks += concat(", cast<", loop, ">(r", k, ")");
    } else {
      loads += concat("    const auto r", k, " = *(const Pack<", memory, ", ", call.width, ">*)(s.data[", k + 1,
                      "] + at[", k + 1, "]);\n");
      row_picks += concat(", cast<", loop, ">(r", k, ".at[j])");
    }
    if (call.constants >> k & 1u) {
      packs += concat("    const ", memory, " c", k, " = *(const ", memory, "*)s.data[", k + 1, "];\n");
      picks += concat(", cast<", loop, ">(c", k, ")");
    } else {
      packs +=
          concat("    const auto a", k, " = ((const Pack<", memory, ", ", call.width, ">*)s.data[", k + 1, "])[i];\n");
      picks += concat(", cast<", loop, ">(a", k, ".at[j])");
    }
  }
  text += concat("__device__ __forceinline__ ", type_in_text(call.out_loop), " compute(const Params& p", parameters,
                 ") {\n", call.checks_divisor ? "  if (x1 == 0) report(p.fault, (i32)p.row, 0, 0, 0);\n" : "",
                 call.expression ? text_of(*call.expression, is_half(call.memory[0])) : "  return x0;\n", "}\n");
  const char* const out = type_in_text(call.memory[0]);
  if (call.linear) {
    text +=
        concat("extern \"C\" __global__ void run(const Space s, const Params p) {\n  FOR_EACH_ELEMENT(i, s.elems / ",
               call.width, ") {\n", packs, "    Pack<", out, ", ", call.width,
               "> y;\n#pragma unroll\n    for (int j = 0; j < ", call.width, "; ++j) y.at[j] = cast<", out,
               ">(compute(p", picks, "));\n    ((Pack<", out, ", ", call.width, ">*)s.data[0])[i] = y;\n  }\n}\n");
  } else {
    text += concat(
        "extern \"C\" __global__ void run(const Space s, const Params p) {\n  FOR_EACH_ELEMENT(i, s.elems) {\n    i64 "
        "at[",
        call.inputs + 1, "];\n    offsets_at<", call.inputs + 1, ">(s, i, at);\n", loads, "    Pack<", out, ", ",
        call.width, "> y;\n#pragma unroll\n    for (int j = 0; j < ", call.width, "; ++j) y.at[j] = cast<", out,
        ">(compute(p", row_picks, "));\n    *(Pack<", out, ", ", call.width, ">*)(s.data[0] + at[0]) = y;\n  }\n}\n");
  }
  return {std::move(text), "run", /*contract=*/false};
}

// Elements that a thread can move at once: up to 16 bytes, where sizes and addresses are multiples of that.
int width_of(const Space& space, const Call& call) {
  size_t widest = 1;
  for (size_t k = 0; k <= call.inputs; ++k) widest = std::max(widest, size_of(call.memory[k]));
  int width = static_cast<int>(std::max<size_t>(1, 16 / widest));
  const auto fits = [&] {
    if (space.elems % width != 0) return false;
    for (size_t k = 0; k <= call.inputs; ++k) {
      if (k > 0 && (call.constants >> (k - 1) & 1u)) continue;
      if (reinterpret_cast<uintptr_t>(space.data[k]) % (static_cast<size_t>(width) * size_of(call.memory[k])) != 0)
        return false;
    }
    return true;
  };
  while (width > 1 && !fits()) width /= 2;
  return width;
}

// The same for rows of a walk that is not linear: the innermost dimension is contiguous, or repeats one element, for
// each operand, and what lies before a row keeps it aligned.
int row_width_of(const Space& space, Call& call) {
  const auto last = static_cast<size_t>(space.dims - 1);
  call.constants = 0;
  size_t widest = 1;
  for (size_t k = 0; k <= call.inputs; ++k) {
    const auto elem = static_cast<int64_t>(size_of(call.memory[k]));
    widest = std::max(widest, static_cast<size_t>(elem));
    if (k > 0 && space.strides[k][last] == 0) {
      call.constants |= 1u << (k - 1);
    } else if (space.strides[k][last] != elem) {
      call.constants = 0;
      return 1;
    }
  }
  int64_t width = static_cast<int64_t>(std::max<size_t>(1, 16 / widest));
  const auto fits = [&] {
    if (space.sizes[last] % width != 0) return false;
    for (size_t k = 0; k <= call.inputs; ++k) {
      if (k > 0 && (call.constants >> (k - 1) & 1u)) continue;
      const int64_t bytes = width * static_cast<int64_t>(size_of(call.memory[k]));
      if (static_cast<int64_t>(reinterpret_cast<uintptr_t>(space.data[k])) % bytes != 0) return false;
      for (size_t d = 0; d < last; ++d) {
        if (space.strides[k][d] % bytes != 0) return false;
      }
    }
    return true;
  };
  while (width > 1 && !fits()) width /= 2;
  if (width == 1) call.constants = 0;
  return static_cast<int>(width);
}

void run(Call& call, const vec::StridedView& out, std::span<const vec::StridedView> in, const Params& params,
         Stream stream) {
  const vec::StridedSpace walk(out, in);
  Space space(walk, in.size() + 1);
  call.memory[0] = out.dtype;
  call.linear = walk[0].linear;
  call.constants = 0;
  for (size_t k = 0; k < in.size(); ++k) {
    call.memory[k + 1] = in[k].dtype;
    if (walk[k + 1].constant) call.constants |= 1u << k;
    call.linear &= walk[k + 1].linear || walk[k + 1].constant;
  }
  call.width = call.linear ? width_of(space, call) : row_width_of(space, call);
  int64_t steps = space.elems / call.width;
  if (!call.linear) {  // a step along a row is a pack
    const auto last = static_cast<size_t>(space.dims - 1);
    space.elems = steps;
    space.sizes[last] /= call.width;
    for (size_t k = 0; k <= call.inputs; ++k) space.strides[k][last] *= call.width;
  }
  const CUfunction kernel = find_kernel(stream.device, key_of(call), [&] { return text_of(call); });
  launch(kernel, {.x = blocks_for(stream.device, steps)}, stream, space, params);
}

// y = f(a, b) with the sums of its columns, in the order of wide_rows.cu's sum_columns.
KernelText summing_text(vec::ScalarOp op, DType dtype) {
  const char* const type = type_in_text(dtype);
  std::string text(chorale::cuda::prelude());
  text += chorale::cuda::kVocabularyCu;
  text += concat("typedef ", type, " T;\ntypedef Compute<T> L;\nstatic const int kCount = 16 / sizeof(T);\n",
                 "__device__ __forceinline__ L compute(const L x0, const L x1) {\n",
                 text_of(vec::expression_of(op), is_half(dtype)), "}\n");
  text += R"(
extern "C" __global__ void __launch_bounds__(256) run(const T* a, const T* b, T* y, L* partial, i64 rows, i64 columns) {
  __shared__ L parts[8][32 * kCount];
  const int lane = threadIdx.x % 32, strip = threadIdx.x / 32;
  const i64 column = (blockIdx.x * 32ll + lane) * kCount;
  const i64 first = blockIdx.y * 8ll + strip, step = gridDim.y * 8ll;
  L sums[kCount] = {};
  if (column < columns) {
#pragma unroll 1
    for (i64 row = first; row < rows; row += step) {
      const i64 at = row * columns + column;
      const Pack16<T> from_a = pack_at(a, at), from_b = pack_at(b, at);
      Pack16<T> to;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        to.at[j] = cast<T>(compute(widen(from_a.at[j]), widen(from_b.at[j])));
        sums[j] += widen(to.at[j]);
      }
      *(Pack16<T>*)(y + at) = to;
    }
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) parts[strip][lane * kCount + j] = sums[j];
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * kCount; i += 256) {
    const i64 at = blockIdx.x * 32ll * kCount + i;
    L sum = 0;
    for (int k = 0; k < 8; ++k) sum += parts[k][i];
    if (at < columns) partial[blockIdx.y * columns + at] = sum;
  }
}
)";
  return {std::move(text), "run", /*contract=*/false};
}

void backward_summed(vec::ScalarOp op, const KernelArgs& args) {
  const Stream stream = args.stream;
  const Tensor dy = contiguous(args.in[0], stream), x = contiguous(args.in[1], stream);
  const Tensor &dx = args.out[0], &sums = args.out[1];
  const DType dtype = dx.dtype();
  const int64_t columns = dx.size(-1), rows = columns == 0 ? 0 : dx.elems() / columns;
  const MatrixRows matrix{rows, columns, columns};
  const bool in_packs = columns % static_cast<int64_t>(16 / size_of(dtype)) == 0 &&
                        reinterpret_cast<uintptr_t>(dy.raw()) % 16 == 0 &&
                        reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
  const auto [tiles, chunks] = column_chunks(dx.raw(), dtype, matrix, dtype, stream.device);
  if (in_packs && chunks > 0) {
    const std::string key = concat("summed ", vec::info(op).name, ' ', type_in_text(dtype));
    const CUfunction kernel = find_kernel(stream.device, key, [&] { return summing_text(op, dtype); });
    const Tensor partial = Tensor::empty({chunks, columns}, compute_of(dtype), stream.device);
    launch(kernel, {.x = static_cast<unsigned>(tiles), .y = static_cast<unsigned>(chunks)}, stream, dy.raw(), x.raw(),
           dx.raw(), partial.raw(), rows, columns);
    return join_columns(partial, columns, 1, sums, stream);
  }
  const Pointwise what{op};
  const Tensor in[] = {dy, x};
  pointwise({in, args.out.first(1), args.attrs, stream, &what, args.row});
  sum_over(dx.view_as({rows, columns}, {columns, 1}, dx.offset()), 0, sums, stream);
}

}  // namespace

void gelu_erf_backward_summed(const KernelArgs& args) { backward_summed(vec::ScalarOp::kGeluErfBackward, args); }
void gelu_tanh_backward_summed(const KernelArgs& args) { backward_summed(vec::ScalarOp::kGeluTanhBackward, args); }

void pointwise(const KernelArgs& args) {
  const Pointwise& what = *args.pointwise;
  const Tensor& out = args.out[0];
  if (out.elems() == 0) return;
  const vec::ScalarInfo& info = vec::info(what.op);
  Call call;
  const DType common = common_dtype(what, args.in, args.attrs);
  CHORALE_INVARIANT(loop_dtype(what.op, common, call.loop), info.name, " has no loop for ", common);
  call.expression = &vec::expression_of(what.op);
  call.name = info.name;
  call.inputs = static_cast<size_t>(info.input_count);
  for (size_t k = 0; k < call.inputs; ++k) call.in_loop[k] = call.loop;
  if (info.kind == vec::ScalarKind::kMasked) call.in_loop[0] = DType::kBool;
  call.out_loop = result_dtype(info.kind, call.loop);
  vec::StridedView views[kMaxInputs];
  for (size_t k = 0; k < call.inputs; ++k) views[k] = strided(args.in[k]);
  call.checks_divisor = is_integral(call.loop) && divides(what.op);
  Params params = params_of(args.attrs, call.loop);
  params.fault = chorale::cuda::fault_of(args.stream.device);
  params.row = row_number(args);
  run(call, strided(out), {views, call.inputs}, params, args.stream);
}

void copy_into(const Tensor& from, const Tensor& to, Stream stream) {
  if (to.elems() == 0) return;
  if (from.dtype() == to.dtype()) {
    return runtime_of(stream.device).copy(strided(from), from.device(), strided(to), to.device(), stream);
  }
  Call call;
  call.expression = nullptr;
  call.name = "copy";
  call.inputs = 1;
  call.loop = call.in_loop[0] = call.out_loop = from.dtype();
  const vec::StridedView view = strided(from);
  run(call, strided(to), {&view, 1}, {}, stream);
}

void copy(const KernelArgs& args) { copy_into(args.in[0], args.out[0], args.stream); }

Tensor contiguous(const Tensor& x, DType dtype, Stream stream) {
  if (x.is_contiguous() && x.dtype() == dtype) return x;
  Tensor made = Tensor::empty(x.sizes(), dtype, x.device());
  copy_into(x, made, stream);
  return made;
}
Tensor contiguous(const Tensor& x, Stream stream) { return contiguous(x, x.dtype(), stream); }

void set_zero(const Tensor& x, Stream stream) {
  constexpr std::byte kZeros[16] = {};
  if (x.elems() > 0) runtime_of(stream.device).fill(kZeros, strided(x), stream);
}

}  // namespace chorale::kernel::cuda
