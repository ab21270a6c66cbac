#include "chorale/kernel/cuda/reduce.h"

#include <algorithm>
#include <cmath>

#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/cuda/wide_rows.h"
#include "chorale/kernel/reduce_attrs.h"

namespace chorale::cuda {
extern const std::string_view kReduceCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kReduceCu;

constexpr int64_t kMostAccumulatorBytes = 24;
// Columns are cut into chunks of at least so many elements each.
constexpr int64_t kLeastChunk = 32;

// What kernels see (Reduction in reduce.cu).
struct Folding {
  const void* in = nullptr;
  void* out = nullptr;
  void* partial = nullptr;
  int64_t results = 1, count = 1;
  int64_t kept_dims = 0, reduced_dims = 0;
  int64_t kept_sizes[8] = {}, kept_strides[8] = {};
  int64_t reduced_sizes[8] = {}, reduced_strides[8] = {};
  int64_t flat_strides[8] = {};
  int64_t chunks = 1;
  double p = 0;
};

// A dimension that walks on where the one before it ends is one with it.
void add_dim(int64_t& dims, int64_t* sizes, int64_t* strides, int64_t* flat, int64_t size, int64_t stride,
             int64_t flat_stride) {
  if (size == 1) return;
  if (dims > 0 && strides[dims - 1] == stride * size && (!flat || flat[dims - 1] == flat_stride * size)) {
    sizes[dims - 1] *= size;
    strides[dims - 1] = stride;
    if (flat) flat[dims - 1] = flat_stride;
    return;
  }
  sizes[dims] = size;
  strides[dims] = stride;
  if (flat) flat[dims] = flat_stride;
  ++dims;
}

// Folds x over these dimensions into `out`, which is contiguous. Results are numbered in the order of the kept ones.
void reduce_with(const KernelArgs& args, const char* fold, DimMask reduced, const Tensor& out, double p = 0) {
  const Tensor& x = args.in[0];
  if (out.elems() == 0) return;
  Folding r{.in = x.raw(), .out = out.raw(), .p = p};
  const Strides flat = contiguous_strides(x.sizes());
  const bool along_one = (reduced & (reduced - 1)) == 0 && x.dims() > 1;
  int64_t closest_kept = INT64_MAX, closest_reduced = INT64_MAX;
  for (size_t d = 0; d < x.sizes().size(); ++d) {
    const int64_t size = x.sizes()[d], stride = x.strides()[d];
    if (reduced >> d & 1u) {
      r.count *= size;
      add_dim(r.reduced_dims, r.reduced_sizes, r.reduced_strides, r.flat_strides, size, stride,
              along_one ? 1 : flat[d]);
      if (size > 1) closest_reduced = std::min(closest_reduced, std::abs(stride));
    } else {
      r.results *= size;
      add_dim(r.kept_dims, r.kept_sizes, r.kept_strides, nullptr, size, stride, 0);
      if (size > 1) closest_kept = std::min(closest_kept, std::abs(stride));
    }
  }
  const std::string types =
      concat(fold, ", ", chorale::cuda::type_in_text(x.dtype()), ", ", chorale::cuda::type_in_text(out.dtype()));
  const Device device = args.stream.device;
  const auto kernel = [&](const char* name) { return instance(args.stream, kReduceCu, name, {}, types.c_str()); };
  const bool by_columns = r.results > 1 && (closest_kept < closest_reduced || r.count < 32);
  if (!by_columns) {
    const unsigned threads = r.count >= 256 ? 256 : r.count >= 64 ? 64 : 32;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(r.results, 1 << 20));
    launch(kernel("reduce_rows"), {.x = blocks, .threads = threads}, args.stream, r);
    return;
  }
  const std::string_view folded = fold;
  if ((folded == "Sum" || folded == "Mean") && r.kept_dims == 1 && r.reduced_dims == 1 && r.kept_strides[0] == 1 &&
      r.reduced_strides[0] >= r.results &&
      sum_columns(r.in, x.dtype(), {r.count, r.results, r.reduced_strides[0]},
                  folded == "Mean" ? static_cast<double>(r.count) : 1, out, args.stream))
    return;
  const unsigned threads = r.results < 4096 ? 64 : 256;
  const unsigned blocks = blocks_for(device, r.results, threads);
  // Enough threads in all to keep the memory busy.
  const int64_t wanted = int64_t{2048} * chorale::cuda::multiprocessors(device) / (int64_t{threads} * blocks);
  r.chunks = std::clamp<int64_t>(std::min(wanted, r.count / kLeastChunk), 1, 1024);
  Tensor partial;
  if (r.chunks > 1) {
    partial = Tensor::empty({r.chunks * r.results * kMostAccumulatorBytes}, DType::kU8, device);
    r.partial = partial.raw();
  }
  launch(kernel("reduce_columns"), {.x = blocks, .y = static_cast<unsigned>(r.chunks), .threads = threads}, args.stream,
         r);
  if (r.chunks > 1) launch(kernel("join_chunks"), {.x = blocks, .threads = threads}, args.stream, r);
}

void reduce_dims(const KernelArgs& args, const char* op, const char* fold) {
  reduce_with(args, fold, dim_mask(op, args.attrs.get<ReduceAttrs>().dims, args.in[0].dims()), args.out[0]);
}

void pick_with(const KernelArgs& args, const char* op, const char* fold, const char* place) {
  const Tensor& x = args.in[0];
  const DimMask reduced = dim_mask(op, IntList{args.attrs.get<PickAttrs>().dim}, x.dims());
  reduce_with(args, fold, reduced, args.out[0]);
  reduce_with(args, place, reduced, args.out[1]);
}
void place_with(const KernelArgs& args, const char* op, const char* place) {
  const auto& a = args.attrs.get<ArgAttrs>();
  reduce_with(args, place, dim_mask(op, a.flat ? IntList() : IntList{a.dim}, args.in[0].dims()), args.out[0]);
}

}  // namespace

void sum_over(const Tensor& x, int64_t dim, const Tensor& out, Stream stream) {
  const Attrs attrs = ReduceAttrs{IntList{dim}, false};
  Tensor result = out;
  sum({{&x, 1}, {&result, 1}, attrs, stream});
}

void sum(const KernelArgs& args) { reduce_dims(args, "sum", "Sum"); }
void mean(const KernelArgs& args) { reduce_dims(args, "mean", "Mean"); }
void prod(const KernelArgs& args) { reduce_dims(args, "prod", "Product"); }
void amax(const KernelArgs& args) { reduce_dims(args, "amax", "Largest"); }
void amin(const KernelArgs& args) { reduce_dims(args, "amin", "Smallest"); }
void any(const KernelArgs& args) { reduce_dims(args, "any", "Any"); }
void all(const KernelArgs& args) { reduce_dims(args, "all", "All"); }
void count_nonzero(const KernelArgs& args) { reduce_dims(args, "count_nonzero", "Nonzero"); }
void logsumexp(const KernelArgs& args) { reduce_dims(args, "logsumexp", "LogSumExp"); }
void max(const KernelArgs& args) { pick_with(args, "max", "Largest", "LargestPlace"); }
void min(const KernelArgs& args) { pick_with(args, "min", "Smallest", "SmallestPlace"); }
void argmax(const KernelArgs& args) { place_with(args, "argmax", "LargestPlace"); }
void argmin(const KernelArgs& args) { place_with(args, "argmin", "SmallestPlace"); }

void norm(const KernelArgs& args) {
  const auto& a = args.attrs.get<NormAttrs>();
  const char* const fold = std::isinf(a.p) ? (a.p > 0 ? "LargestSize" : "SmallestSize") : "Norm";
  reduce_with(args, fold, dim_mask("norm", a.dims, args.in[0].dims()), args.out[0], a.p);
}
void var(const KernelArgs& args) {
  const auto& a = args.attrs.get<VarAttrs>();
  reduce_with(args, "Variance", dim_mask("var", a.dims, args.in[0].dims()), args.out[0], a.correction);
}
void std_deviation(const KernelArgs& args) {
  const auto& a = args.attrs.get<VarAttrs>();
  reduce_with(args, "Deviation", dim_mask("std", a.dims, args.in[0].dims()), args.out[0], a.correction);
}

}  // namespace chorale::kernel::cuda
