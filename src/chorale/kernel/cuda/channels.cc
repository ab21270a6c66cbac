#include "chorale/kernel/cuda/channels.h"

#include <algorithm>
#include <bit>

#include "chorale/kernel/cuda/family.h"

namespace chorale::cuda {
extern const std::string_view kChannelsCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kChannelsCu;

// What kernels see (channels.cu).
struct Columns {
  int64_t rows, channels, shift;
};
// The blocks that run at once: each begins with a walk over its channels' numbers.
constexpr int64_t kBlocksPerMultiprocessor = 4;
struct ColumnGrid {
  ColumnGrid(const ChannelNorm& norm, DType dtype, Device device) : columns{norm.rows, norm.channels, 0} {
    const int64_t packs = norm.channels / static_cast<int64_t>(16 / size_of(dtype));
    // No more than a warp lies side by side: the more columns a block has, the more sums it writes for its few rows.
    columns.shift = std::bit_width(static_cast<uint64_t>(std::min<int64_t>(packs, 32))) - 1;
    const int64_t across = int64_t{1} << columns.shift, tiles = (packs + across - 1) / across, high = 256 / across;
    const int64_t wanted = kBlocksPerMultiprocessor * chorale::cuda::multiprocessors(device) / tiles;
    chunks = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, norm.rows / (4 * high)));
    grid = {.x = static_cast<unsigned>(tiles), .y = static_cast<unsigned>(chunks)};
  }
  Columns columns;
  int64_t chunks = 1;
  Grid grid;
};
Grid join_grid(int64_t channels) { return {.x = static_cast<unsigned>((channels + 31) / 32), .threads = 1024}; }
void* data_or_null(const Tensor& x) { return x.defined() ? x.raw() : nullptr; }

}  // namespace

bool reads_columns(std::initializer_list<const Tensor*> matrices, int64_t channels) {
  return std::all_of(matrices.begin(), matrices.end(), [&](const Tensor* x) {
    return !x->defined() || (channels > 0 && channels % static_cast<int64_t>(16 / size_of(x->dtype())) == 0 &&
                             reinterpret_cast<uintptr_t>(x->raw()) % 16 == 0);
  });
}

void normalize_columns(const Tensor& x, const ChannelNorm& norm, const Tensor& y, Stream stream, bool relu,
                       const Tensor& other) {
  const ColumnGrid grid(norm, x.dtype(), stream.device);
  const Tensor partial = Tensor::empty({grid.chunks * 2 * norm.channels}, compute_of(x.dtype()), stream.device);
  launch(instance(stream, kChannelsCu, "moments_of_columns", {x.dtype()}), grid.grid, stream, x.raw(), partial.raw(),
         grid.columns);
  launch(instance(stream, kChannelsCu, "join_moments", {x.dtype()}), join_grid(norm.channels), stream, x.raw(),
         partial.raw(), norm.mean.raw(), norm.variance.raw(), grid.chunks, norm.rows, norm.channels);
  const char* const what = other.defined() ? "true, true" : relu ? "false, true" : "false, false";
  launch(instance(stream, kChannelsCu, "normalize_columns", {x.dtype()}, what), grid.grid, stream, x.raw(),
         data_or_null(other), norm.mean.raw(), norm.variance.raw(), data_or_null(norm.weight), data_or_null(norm.bias),
         y.raw(), grid.columns, norm.eps);
}

void normalize_columns_backward(const ChannelSlopes& slopes, const Tensor& x, const ChannelNorm& norm, const Tensor& dx,
                                const Tensor& dweight, const Tensor& dbias, Stream stream) {
  const DType compute = compute_of(x.dtype());
  const ColumnGrid grid(norm, x.dtype(), stream.device);
  const Tensor partial = Tensor::empty({grid.chunks * 2 * norm.channels}, compute, stream.device);
  const bool is_written = slopes.result.defined();
  const char* const from = slopes.other.defined() ? "kReluOfSum"
                           : is_written           ? "kReluOf"
                           : slopes.relu          ? "kReluAgain"
                                                  : "kPlain";
  launch(instance(stream, kChannelsCu, "slopes_of_columns", {x.dtype()}, from), grid.grid, stream, slopes.dy.raw(),
         data_or_null(slopes.other), data_or_null(slopes.result), x.raw(), norm.mean.raw(), norm.variance.raw(),
         data_or_null(norm.weight), data_or_null(norm.bias), data_or_null(slopes.through), partial.raw(), grid.columns,
         norm.eps);
  launch(instance(stream, kChannelsCu, "join_slopes", {compute}), join_grid(norm.channels), stream, partial.raw(),
         norm.variance.raw(), dweight.raw(), dbias.raw(), grid.chunks, norm.channels, norm.eps);
  const Tensor& from_relu = is_written ? slopes.through : slopes.dy;
  launch(instance(stream, kChannelsCu, "normalize_columns_backward", {x.dtype()},
                  slopes.relu && !is_written ? "true" : "false"),
         grid.grid, stream, from_relu.raw(), x.raw(), norm.mean.raw(), norm.variance.raw(), data_or_null(norm.weight),
         data_or_null(norm.bias), dweight.raw(), dbias.raw(), dx.raw(), grid.columns, norm.eps);
}

}  // namespace chorale::kernel::cuda
