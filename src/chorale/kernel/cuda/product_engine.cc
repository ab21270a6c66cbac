#include "chorale/kernel/cuda/product_engine.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/base/same_bits.h"
#include "chorale/base/tf32.h"
#include "chorale/device/cuda/context.h"
#include "chorale/device/cuda/driver.h"
#include "chorale/device/cuda/kernel_cache.h"
#include "chorale/device/cuda/libraries.h"
#include "chorale/device/cuda/timing.h"
#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/cuda/small_product.h"

namespace chorale::kernel::cuda {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;

// The formatter moves such a list to the right each time.
// clang-format off
#define CHORALE_CUBLAS(X) \
  X(cublasLtCreate) X(cublasLtMatmul) X(cublasLtMatmulDescCreate) X(cublasLtMatmulDescDestroy) \
  X(cublasLtMatmulDescSetAttribute) X(cublasLtMatrixLayoutCreate) X(cublasLtMatrixLayoutDestroy) \
  X(cublasLtMatrixLayoutSetAttribute) X(cublasLtMatmulPreferenceCreate) X(cublasLtMatmulPreferenceDestroy) \
  X(cublasLtMatmulPreferenceSetAttribute) X(cublasLtMatmulAlgoGetHeuristic) X(cublasLtGetStatusString) \
  X(cublasLtGetVersion)
// clang-format on

struct Cublas {
#define CHORALE_CUBLAS_MEMBER(name) decltype(&::name) name = nullptr;
  CHORALE_CUBLAS(CHORALE_CUBLAS_MEMBER)
#undef CHORALE_CUBLAS_MEMBER
};

const Cublas& cublas() {
  static const Cublas found = [] {
    void* const library = chorale::cuda::open_library({"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"},
                                                      "install NVIDIA's libcublas, or Python's nvidia-cublas");
    Cublas functions;
#define CHORALE_CUBLAS_FIND(name) \
  functions.name = reinterpret_cast<decltype(functions.name)>(chorale::cuda::find_function(library, #name));
    CHORALE_CUBLAS(CHORALE_CUBLAS_FIND)
#undef CHORALE_CUBLAS_FIND
    return functions;
  }();
  return found;
}

void check_cublas(cublasStatus_t status, const char* tried) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const char* const op = chorale::cuda::OpScope::current();
  throw StateError(
      concat("[", op ? op : "product", "] cuBLASLt says: ", tried, ": ", cublas().cublasLtGetStatusString(status)));
}

// Handles and workspaces are made per device and stream, and live as long as the process.
struct Place {
  cublasLtHandle_t handle = nullptr;
  Tensor workspace;
};
Place& place_of(Stream stream) {
  static std::mutex mutex;
  static auto* const places = new std::map<void*, Place>;
  const std::lock_guard lock(mutex);
  Place& place = (*places)[stream.handle];
  if (!place.handle) {
    check_cublas(cublas().cublasLtCreate(&place.handle), "starting");
    place.workspace = Tensor::empty({static_cast<int64_t>(kWorkspaceBytes)}, DType::kU8, stream.device);
  }
  return place;
}

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return CUDA_R_16F;
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kF64:
      return CUDA_R_64F;
    case DType::kC64:
      return CUDA_C_32F;
    default:
      return CUDA_C_64F;
  }
}

cudaDataType_t type_of(DType dtype, Fp8 format) {
  if (dtype != DType::kU8) return type_of(dtype);
  return format == Fp8::kE4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
}

// cuBLASLt's matrices are column-major: of ours it sees the transposes, and computes c' = b' a'.
struct Operand {
  bool transposed;  // it is read as cuBLASLt's transpose
  int64_t ld;
};
// Our matrix [rows, cols] as what cuBLASLt calls [cols, rows].
Operand operand_of(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  if (col_stride == 1 || cols == 1) {
    if (rows == 1 || row_stride >= cols) return {false, rows == 1 ? cols : row_stride};
  }
  return {true, cols == 1 ? rows : col_stride};
}

int alignment_of(const void* pointer, int64_t ld, int64_t batch_stride, DType dtype) {
  const auto bytes = static_cast<int64_t>(size_of(dtype));
  const uint64_t bits = reinterpret_cast<uintptr_t>(pointer) | static_cast<uint64_t>(ld * bytes) |
                        static_cast<uint64_t>(batch_stride * bytes) | 256u;
  return 1 << std::countr_zero(bits);
}

// What the choice of an algorithm depends on.
struct Key {
  std::array<int64_t, 16> facts;
  bool operator<(const Key& other) const { return facts < other.facts; }
};

// Descriptors and the algorithm for a kind of product; made once.
struct Plan {
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algo{};
};
using Guesses = std::vector<cublasLtMatmulHeuristicResult_t>;

cublasStatus_t multiply(const Plan& plan, const cublasLtMatmulAlgo_t& algo, const Product& p, const Place& place,
                        Stream stream) {
  struct {
    double d[2];
    float f[2];
  } alpha{{p.alpha, 0}, {static_cast<float>(p.alpha), 0}}, beta{{p.beta, 0}, {static_cast<float>(p.beta), 0}};
  const bool wide = p.dtype == DType::kF64 || p.dtype == DType::kC128;
  const void* const alpha_at = wide ? static_cast<const void*>(alpha.d) : alpha.f;
  const void* const beta_at = wide ? static_cast<const void*>(beta.d) : beta.f;
  return cublas().cublasLtMatmul(place.handle, plan.desc, alpha_at, p.b, plan.a, p.a, plan.b, beta_at, p.c, plan.c, p.c,
                                 plan.c, &algo, place.workspace.raw(), kWorkspaceBytes,
                                 static_cast<cudaStream_t>(stream.handle));
}

double operations_of(const Product& p) {
  return 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k) *
         static_cast<double>(p.batch);
}
// Whether algorithms are timed at the first call for a kind of product. The result is written by each of them, so it
// must not be read; while something is recorded nothing can be timed, and the library's first guess stays.
bool is_timed(const Product& p, Stream stream) {
  constexpr double kLeastOperations = 0x1p26;  // those of smaller ones differ by less than clocks tell
  return operations_of(p) >= kLeastOperations && p.beta == 0 && !same_bits() && !chorale::cuda::is_recorded(stream);
}

// Large products make a chip draw all the power that it may, and its clocks fall: other algorithms are the fastest then
// than on a chip that was idle. So the first large one of a process is run for a while.
void warm_up(const std::function<void()>& product, Stream stream) {
  static std::once_flag warm[chorale::cuda::kMostDevices];
  std::call_once(warm[stream.device.index], [&] {
    constexpr float kMilliseconds = 400;
    constexpr int kTogether = 20;
    float took = 0;
    while (took < kMilliseconds) {
      took += chorale::cuda::time_on(stream, [&] {
        for (int i = 0; i < kTogether; ++i) product();
      });
    }
  });
}

// The guess that is the fastest on this memory, into which it writes. They run in turns, since clocks change while they
// do, and the least that each takes counts.
cublasLtMatmulAlgo_t fastest(const Plan& plan, const Guesses& guesses, const Product& p, const Place& place,
                             Stream stream) {
  constexpr int kTurns = 3;
  constexpr double kLargeOperations = 0x1p36;
  const int runs = operations_of(p) < 0x1p32 ? 4 : 1;
  std::vector<float> least(guesses.size(), std::numeric_limits<float>::infinity());
  std::vector<bool> works(guesses.size());
  const auto once = [&](size_t i) { return multiply(plan, guesses[i].algo, p, place, stream); };
  // The first run loads the kernel.
  for (size_t i = 0; i < guesses.size(); ++i) works[i] = once(i) == CUBLAS_STATUS_SUCCESS;
  if (operations_of(p) >= kLargeOperations && works[0]) warm_up([&] { check_cublas(once(0), "warming up"); }, stream);
  for (int turn = 0; turn < kTurns; ++turn) {
    for (size_t i = 0; i < guesses.size(); ++i) {
      if (!works[i]) continue;
      least[i] = std::min(least[i], chorale::cuda::time_on(stream, [&] {
                            for (int run = 0; run < runs; ++run) check_cublas(once(i), "timing a product");
                          }));
    }
  }
  return guesses[static_cast<size_t>(std::min_element(least.begin(), least.end()) - least.begin())].algo;
}

// What was found to be the fastest is kept on disk, beside compiled kernels: it is timed once per machine and user.
std::string identity_of(const Key& key, Stream stream) {
  std::string identity =
      concat("product ", chorale::cuda::facts_of(stream.device).name, " cuBLASLt ", cublas().cublasLtGetVersion());
  for (const int64_t fact : key.facts) identity += concat(" ", fact);
  return identity;
}
cublasLtMatmulAlgo_t known_or_fastest(const Key& key, const Plan& plan, const Guesses& guesses, const Product& p,
                                      const Place& place, Stream stream) {
  const std::string identity = identity_of(key, stream);
  cublasLtMatmulAlgo_t algo{};
  chorale::cuda::CompiledKernel kept;
  if (chorale::cuda::find_in_cache(identity, kept) && kept.binary.size() == sizeof(algo)) {
    std::memcpy(&algo, kept.binary.data(), sizeof(algo));
    return algo;
  }
  algo = fastest(plan, guesses, p, place, stream);
  const char* const bytes = reinterpret_cast<const char*>(&algo);
  chorale::cuda::put_into_cache(identity, {"algorithm", {bytes, bytes + sizeof(algo)}});
  return algo;
}

Plan make_plan(const Key& key, const Product& p, const Operand& a, const Operand& b, const Place& place, Stream stream,
               int a_align, int b_align, int c_align) {
  const Cublas& api = cublas();
  const bool wide = p.dtype == DType::kF64 || p.dtype == DType::kC128;
  const bool is_single = p.dtype == DType::kF32 || p.dtype == DType::kC64;
  const cublasComputeType_t compute = wide                  ? CUBLAS_COMPUTE_64F
                                      : is_single && tf32() ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                            : CUBLAS_COMPUTE_32F;
  const cudaDataType_t scale = p.dtype == DType::kC128  ? CUDA_C_64F
                               : p.dtype == DType::kC64 ? CUDA_C_32F
                               : wide                   ? CUDA_R_64F
                                                        : CUDA_R_32F;
  Plan plan;
  check_cublas(api.cublasLtMatmulDescCreate(&plan.desc, compute, scale), "describing a product");
  const auto set = [&](cublasLtMatmulDescAttributes_t what, const auto& value) {
    check_cublas(api.cublasLtMatmulDescSetAttribute(plan.desc, what, &value, sizeof(value)), "describing a product");
  };
  // The first matrix of cuBLASLt is our b.
  set(CUBLASLT_MATMUL_DESC_TRANSA, b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_TRANSB, a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (p.bias) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  }
  if (p.dtype == DType::kU8) {
    if (p.bias) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(p.c_dtype));
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scale);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scale);
  }
  const auto layout = [&](cublasLtMatrixLayout_t& made, cudaDataType_t type, int64_t rows, int64_t cols, int64_t ld,
                          int64_t stride) {
    check_cublas(
        api.cublasLtMatrixLayoutCreate(&made, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), ld),
        "describing a matrix");
    const auto batch = static_cast<int32_t>(p.batch);
    check_cublas(api.cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof(batch)),
                 "describing a batch");
    check_cublas(api.cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                                      sizeof(stride)),
                 "describing a batch");
  };
  layout(plan.a, type_of(p.dtype, p.b_format), b.transposed ? p.k : p.n, b.transposed ? p.n : p.k, b.ld, p.b_batch);
  layout(plan.b, type_of(p.dtype, p.a_format), a.transposed ? p.m : p.k, a.transposed ? p.k : p.m, a.ld, p.a_batch);
  layout(plan.c, type_of(p.c_dtype), p.n, p.m, p.m == 1 ? p.n : p.c_row, p.c_batch);

  cublasLtMatmulPreference_t preference = nullptr;
  check_cublas(api.cublasLtMatmulPreferenceCreate(&preference), "choosing an algorithm");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, const auto& value) {
    api.cublasLtMatmulPreferenceSetAttribute(preference, what, &value, sizeof(value));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(b_align));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(a_align));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(c_align));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(c_align));
  constexpr int kMostTried = 8;
  const bool timed = is_timed(p, stream);
  Guesses guesses(timed ? kMostTried : 1);
  int count = 0;
  const cublasStatus_t status =
      api.cublasLtMatmulAlgoGetHeuristic(place.handle, plan.desc, plan.a, plan.b, plan.c, plan.c, preference,
                                         static_cast<int>(guesses.size()), guesses.data(), &count);
  api.cublasLtMatmulPreferenceDestroy(preference);
  check_cublas(status, "choosing an algorithm");
  CHORALE_CHECK_STATE(count > 0, "cuBLASLt has no algorithm for a product [", p.m, ", ", p.k, "] x [", p.k, ", ", p.n,
                      "] in ", p.dtype);
  guesses.resize(static_cast<size_t>(count));
  plan.algo = count > 1 ? known_or_fastest(key, plan, guesses, p, place, stream) : guesses[0].algo;
  return plan;
}

Plan& plan_for(const Product& p, const Operand& a, const Operand& b, Place& place, Stream stream) {
  const int a_align = alignment_of(p.a, a.ld, p.a_batch, p.dtype),
            b_align = alignment_of(p.b, b.ld, p.b_batch, p.dtype);
  const int c_align = alignment_of(p.c, p.c_row, p.c_batch, p.c_dtype);
  const Key key{{stream.device.index, static_cast<int64_t>(p.dtype), static_cast<int64_t>(p.c_dtype), p.m, p.n, p.k,
                 a.transposed, a.ld, b.transposed, b.ld, p.c_row, p.batch, p.a_batch, p.b_batch, p.c_batch,
                 (p.bias ? 1 : 0) | a_align << 1 | b_align << 11 | static_cast<int64_t>(c_align) << 21 |
                     static_cast<int64_t>(p.a_format) << 31 | static_cast<int64_t>(p.b_format) << 32 |
                     static_cast<int64_t>(tf32()) << 33}};
  static std::mutex mutex;
  static auto* const plans = new std::map<Key, std::unique_ptr<Plan>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Plan>& plan = (*plans)[key];
  if (!plan) plan = std::make_unique<Plan>(make_plan(key, p, a, b, place, stream, a_align, b_align, c_align));
  return *plan;
}

// For dtypes of 16 bits cuBLASLt has its fast kernels where sizes are multiples of 8 (a layer of 30,522 classes took
// three times as long as one of 30,528). What is left over is a product of its own.
bool product_in_two(const Product& p, Stream stream) {
  constexpr int64_t kStep = 8, kLeast = 1024;
  const auto is_odd = [](int64_t size) { return size >= kLeast && size % kStep != 0; };
  const auto in_steps = [](int64_t row, int64_t col) { return (row == 1 ? col : row) % kStep == 0; };
  if (!is_half(p.dtype) || p.batch != 1 || !in_steps(p.a_row, p.a_col) || !in_steps(p.b_row, p.b_col) ||
      p.c_row % kStep != 0)
    return false;
  const auto at = [](const void* base, int64_t elems, DType dtype) {
    return static_cast<const std::byte*>(base) + elems * static_cast<int64_t>(size_of(dtype));
  };
  Product first = p, rest = p;
  const auto move_c = [&](int64_t elems) {
    rest.c = static_cast<std::byte*>(p.c) + elems * static_cast<int64_t>(size_of(p.c_dtype));
  };
  if (is_odd(p.n)) {
    first.n = p.n - p.n % kStep;
    rest.n = p.n % kStep;
    rest.b = at(p.b, first.n * p.b_col, p.dtype);
    if (p.bias) rest.bias = at(p.bias, first.n, p.dtype);
    move_c(first.n);
  } else if (is_odd(p.m)) {
    first.m = p.m - p.m % kStep;
    rest.m = p.m % kStep;
    rest.a = at(p.a, first.m * p.a_row, p.dtype);
    move_c(first.m * p.c_row);
  } else if (is_odd(p.k)) {
    first.k = p.k - p.k % kStep;
    rest.k = p.k % kStep;
    rest.a = at(p.a, first.k * p.a_col, p.dtype);
    rest.b = at(p.b, first.k * p.b_row, p.dtype);
    rest.beta = 1;
    rest.bias = nullptr;
  } else {
    return false;
  }
  product(first, stream);
  product(rest, stream);
  return true;
}

}  // namespace

bool is_readable(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  const Operand x = operand_of(rows, cols, row_stride, col_stride);
  if (!x.transposed) return true;
  return (row_stride == 1 || rows == 1) && x.ld >= rows;
}

void product(const Product& asked, Stream stream) {
  Product p = asked;
  if (p.c_dtype == DType::kBool) p.c_dtype = p.dtype;
  if (p.m == 0 || p.n == 0 || p.batch == 0) return;
  if (multiply_small(p, stream)) return;
  if (chorale::cuda::driver().rehearsal || chorale::cuda::makes_ahead()) return;  // cuBLASLt has its kernels
  if (product_in_two(p, stream)) return;
  chorale::cuda::make_current(stream.device);
  const Operand a = operand_of(p.m, p.k, p.a_row, p.a_col), b = operand_of(p.k, p.n, p.b_row, p.b_col);
  Place& place = place_of(stream);
  // A plan's pointers to bias and scales belong to the call: calls from several threads take turns.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  Plan& plan = plan_for(p, a, b, place, stream);
  const auto point = [&](cublasLtMatmulDescAttributes_t what, const auto* pointer) {
    check_cublas(cublas().cublasLtMatmulDescSetAttribute(plan.desc, what, &pointer, sizeof(pointer)),
                 "setting a pointer");
  };
  if (p.bias) point(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  if (p.dtype == DType::kU8) {
    point(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scale);
    point(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scale);
  }
  check_cublas(multiply(plan, plan.algo, p, place, stream), "multiplying");
}

}  // namespace chorale::kernel::cuda
