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

// As kernels see it (channels.cu).
struct Columns {
  int64_t rows, channels, across;
};
struct ColumnGrid {
  ColumnGrid(const ChannelNorm& norm, DType dtype, Device device, int64_t blocks_per_multiprocessor)
      : columns{norm.rows, norm.channels, 1} {
    const int64_t packs = norm.channels / static_cast<int64_t>(16 / size_of(dtype));
    columns.across = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::min<int64_t>(packs, 256))));
    const int64_t tiles = (packs + columns.across - 1) / columns.across, high = 256 / columns.across;
    const int64_t wanted = blocks_per_multiprocessor * chorale::cuda::multiprocessors(device) / tiles;
    chunks = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, norm.rows / (4 * high)));
    grid = {.x = static_cast<unsigned>(tiles), .y = static_cast<unsigned>(chunks)};
  }
  Columns columns;
  int64_t chunks = 1;
  Grid grid;
};
Grid join_grid(int64_t channels) { return {.x = static_cast<unsigned>((channels + 31) / 32)}; }
void* data_or_null(const Tensor& x) { return x.defined() ? x.raw() : nullptr; }

// Sums need few blocks, since their results are added up again; the others as many as the device takes.
constexpr int64_t kBlocksForSums = 4, kBlocksForRows = 16;

}  // namespace

bool reads_columns(std::initializer_list<const Tensor*> matrices, int64_t channels) {
  return std::all_of(matrices.begin(), matrices.end(), [&](const Tensor* x) {
    return channels > 0 && channels % static_cast<int64_t>(16 / size_of(x->dtype())) == 0 &&
           reinterpret_cast<uintptr_t>(x->raw()) % 16 == 0;
  });
}

void normalize_columns(const Tensor& x, const ChannelNorm& norm, const Tensor& y, Stream stream) {
  const ColumnGrid sums(norm, x.dtype(), stream.device, kBlocksForSums),
      all(norm, x.dtype(), stream.device, kBlocksForRows);
  const Tensor partial = Tensor::empty({sums.chunks * 2 * norm.channels}, compute_of(x.dtype()), stream.device);
  launch(instance(stream, kChannelsCu, "moments_of_columns", {x.dtype()}), sums.grid, stream, x.raw(), partial.raw(),
         sums.columns);
  launch(instance(stream, kChannelsCu, "join_moments", {x.dtype()}), join_grid(norm.channels), stream, x.raw(),
         partial.raw(), norm.mean.raw(), norm.variance.raw(), sums.chunks, norm.rows, norm.channels);
  launch(instance(stream, kChannelsCu, "normalize_columns", {x.dtype()}), all.grid, stream, x.raw(), norm.mean.raw(),
         norm.variance.raw(), data_or_null(norm.weight), data_or_null(norm.bias), y.raw(), all.columns, norm.eps);
}

void normalize_columns_backward(const Tensor& dy, const Tensor& x, const ChannelNorm& norm, const Tensor& dx,
                                const Tensor& dweight, const Tensor& dbias, Stream stream) {
  const DType compute = compute_of(x.dtype());
  const ColumnGrid sums(norm, x.dtype(), stream.device, kBlocksForSums),
      all(norm, x.dtype(), stream.device, kBlocksForRows);
  const Tensor partial = Tensor::empty({sums.chunks * 2 * norm.channels}, compute, stream.device);
  launch(instance(stream, kChannelsCu, "slopes_of_columns", {x.dtype()}), sums.grid, stream, dy.raw(), x.raw(),
         norm.mean.raw(), partial.raw(), sums.columns);
  launch(instance(stream, kChannelsCu, "join_slopes", {compute}), join_grid(norm.channels), stream, partial.raw(),
         norm.variance.raw(), dweight.raw(), dbias.raw(), sums.chunks, norm.channels, norm.eps);
  launch(instance(stream, kChannelsCu, "normalize_columns_backward", {x.dtype()}), all.grid, stream, dy.raw(), x.raw(),
         norm.mean.raw(), norm.variance.raw(), data_or_null(norm.weight), dweight.raw(), dbias.raw(), dx.raw(),
         all.columns, norm.eps);
}

}  // namespace chorale::kernel::cuda
