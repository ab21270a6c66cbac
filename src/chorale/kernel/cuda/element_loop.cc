#include "chorale/kernel/cuda/element_loop.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "chorale/base/error.h"
#include "chorale/kernel/cuda/family.h"

namespace chorale::cuda {
extern const std::string_view kVocabularyCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::find_kernel;
using chorale::cuda::KernelText;
using chorale::cuda::launch_with;
using chorale::cuda::type_in_text;

constexpr size_t kMostLoopDims = 8;

// How an operand lies along the innermost dimension: a thread reads a pack of neighbours, repeats one element, or takes
// each by itself.
enum class LoopAlong : char { kPack = 'p', kOne = 'o', kStep = 's' };

// All that a kernel's text depends on, beside the loop's body.
struct LoopShape {
  size_t dims = 1;
  int64_t width = 1;    // elements that a thread moves at once
  bool narrow = false;  // places fit into 32 bits, whose division is several times faster
  std::vector<LoopAlong> along;
};

std::string loop_key(const ElementLoop& loop, const LoopShape& shape) {
  std::string key = concat("loop ", loop.name, ' ', shape.dims, ' ', shape.width, shape.narrow ? 'n' : 'w');
  for (const LoopAlong one : shape.along) key += static_cast<char>(one);
  return key;
}

KernelText loop_text(const ElementLoop& loop, const LoopShape& shape) {
  const size_t operands = loop.dtypes.size();
  std::string text(chorale::cuda::prelude());
  text += chorale::cuda::kVocabularyCu;
  text += concat("typedef ", loop.is_f64 ? "double" : "float",
                 " L;\nstruct Loop {\n  i64 elems, sizes[8];\n  char* data[", operands, "];\n  i64 strides[", operands,
                 "][8];\n};\nextern \"C\" __global__ void run(const Loop s) {\n  FOR_EACH_ELEMENT(i, s.elems) {\n");
  const char* const place = shape.narrow ? "u32" : "i64";
  text += concat("    ", place, " rest = (", place, ")i;\n");
  for (size_t k = 0; k < operands; ++k) text += concat("    char* q", k, " = s.data[", k, "];\n");
  for (size_t d = shape.dims; d-- > 0;) {
    if (d > 0) {
      text += concat("    const ", place, " next", d, " = rest / (", place, ")s.sizes[", d, "], at", d,
                     " = rest - next", d, " * (", place, ")s.sizes[", d, "];\n    rest = next", d, ";\n");
    } else {
      text += concat("    const ", place, " at0 = rest;\n");
    }
    for (size_t k = 0; k < operands; ++k) text += concat("    q", k, " += at", d, " * s.strides[", k, "][", d, "];\n");
  }
  const auto type = [&](size_t k) { return type_in_text(loop.dtypes[k]); };
  const auto in_lanes = [&](size_t k) { return loop.dtypes[k] == DType::kBool ? "bool" : "L"; };
  const auto pack = [&](size_t k) { return concat("Pack<", type(k), ", ", shape.width, ">"); };
  std::string picks, results;
  for (size_t k = 0; k < operands; ++k) {
    const bool packed = shape.along[k] == LoopAlong::kPack;
    const size_t number = k < loop.inputs ? k : k - loop.inputs;
    if (k < loop.inputs) {
      text += concat("    const auto a", k, " = *(const ", packed ? pack(k) : type(k), "*)q", k, ";\n");
      picks += concat("      const ", in_lanes(k), " x", k, " = cast<", in_lanes(k), ">(a", k, packed ? ".at[j]" : "",
                      ");\n");
    } else {
      text += concat("    ", pack(k), " b", number, ";\n");
      picks += concat("      ", in_lanes(k), " y", number, ";\n");
      results += concat("      b", number, ".at[j] = cast<", type(k), ">(y", number, ");\n");
    }
  }
  text += concat("#pragma unroll\n    for (int j = 0; j < ", shape.width, "; ++j) {\n", picks, loop.body, results,
                 "    }\n");
  for (size_t k = loop.inputs; k < operands; ++k)
    text += concat("    *(", pack(k), "*)q", k, " = b", k - loop.inputs, ";\n");
  text += "  }\n}\n";
  return {std::move(text), "run", /*contract=*/false};
}

class CudaElementLoops final : public ElementLoops {
 public:
  void run(const ElementLoop& loop, std::span<const Tensor> in, std::span<Tensor> out, Stream stream) override {
    const size_t operands = loop.dtypes.size(), dims = loop.sizes.size(), last = dims - 1;
    CHORALE_INVARIANT(in.size() == loop.inputs && in.size() + out.size() == operands && dims <= kMostLoopDims,
                      "a loop of ", operands, " operands got ", in.size(), " and ", out.size());
    // Loop in the text: elems, sizes[8], data[operands], strides[operands][8].
    constexpr size_t kSizes = 1, kData = kSizes + kMostLoopDims;
    const size_t strides = kData + operands;
    std::vector<int64_t> s(strides + operands * kMostLoopDims, 0);
    const auto stride = [&](size_t k, size_t d) -> int64_t& { return s[strides + k * kMostLoopDims + d]; };
    size_t widest = 1;
    for (size_t k = 0; k < operands; ++k) {
      const Tensor& x = k < in.size() ? in[k] : out[k - in.size()];
      const size_t elem = size_of(loop.dtypes[k]);
      widest = std::max(widest, elem);
      s[kData + k] = static_cast<int64_t>(reinterpret_cast<uintptr_t>(x.raw()));
      for (size_t d = 0; d < dims; ++d) stride(k, d) = loop.strides[k][d] * static_cast<int64_t>(elem);
    }
    std::copy(loop.sizes.begin(), loop.sizes.end(), s.begin() + kSizes);
    LoopShape shape;
    shape.dims = dims;
    shape.width = widest_packs(loop, s, strides, static_cast<int64_t>(16 / widest));
    s[kSizes + last] /= shape.width;
    s[0] = std::accumulate(s.begin() + kSizes, s.begin() + kSizes + static_cast<ptrdiff_t>(dims), int64_t{1},
                           std::multiplies<>());
    shape.narrow = s[0] <= INT32_MAX;
    for (size_t k = 0; k < operands; ++k) {
      const int64_t along = loop.strides[k][last];
      shape.along.push_back(k >= loop.inputs || along == 1 ? LoopAlong::kPack
                            : along == 0                   ? LoopAlong::kOne
                                                           : LoopAlong::kStep);
      stride(k, last) *= shape.width;
    }
    const CUfunction kernel = find_kernel(stream.device, loop_key(loop, shape), [&] { return loop_text(loop, shape); });
    void* arguments[] = {s.data()};
    launch_with(kernel, {.x = blocks_for(stream.device, s[0])}, stream, arguments);
  }

 private:
  // How many elements a thread may move at once: all operands lie in packs of them, or repeat one element.
  static int64_t widest_packs(const ElementLoop& loop, const std::vector<int64_t>& s, size_t strides, int64_t width) {
    const size_t dims = loop.sizes.size(), last = dims - 1;
    const auto fits = [&] {
      if (loop.sizes[last] % width != 0) return false;
      for (size_t k = 0; k < loop.dtypes.size(); ++k) {
        const int64_t along = loop.strides[k][last], bytes = width * static_cast<int64_t>(size_of(loop.dtypes[k]));
        if (along == 0) continue;
        if (along != 1 || s[1 + kMostLoopDims + k] % bytes != 0) return false;
        for (size_t d = 0; d < last; ++d) {
          if (s[strides + k * kMostLoopDims + d] % bytes != 0) return false;
        }
      }
      return true;
    };
    while (width > 1 && !fits()) width /= 2;
    return width;
  }
};

}  // namespace

ElementLoops& element_loops() {
  static auto* const loops = new CudaElementLoops;
  return *loops;
}

}  // namespace chorale::kernel::cuda
