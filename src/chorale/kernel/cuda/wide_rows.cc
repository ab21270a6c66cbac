#include "chorale/kernel/cuda/wide_rows.h"

#include <algorithm>

#include "chorale/kernel/cuda/family.h"

namespace chorale::cuda {
extern const std::string_view kWideLossesCu, kWideRowsCu;
}

namespace chorale::kernel::cuda {
namespace {

using chorale::cuda::kWideLossesCu;
using chorale::cuda::kWideRowsCu;

constexpr int64_t kWarpsPerBlock = 8, kMostPacks = 8;
// Shared memory of a block that the kernel itself and the device take.
constexpr int64_t kOtherBytes = 2048;

bool begins_at_16(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }
int64_t elems_per_pack(DType dtype) { return static_cast<int64_t>(16 / size_of(dtype)); }
int64_t divided_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// What the two kernels of a norm have in common. Packs of a row in a thread; 0: not for this call.
int64_t packs_of(const Tensor& x, int64_t n) {
  const int64_t per_pack = elems_per_pack(x.dtype()), packs = divided_up(n, 32 * per_pack);
  return n > 0 && n % per_pack == 0 && packs <= kMostPacks && begins_at_16(x.raw()) ? packs : 0;
}
// `narrow`: the normalised values, or their gradient.
CUfunction norm_kernel(const char* name, const Tensor& x, const Tensor& narrow, const RowNorm& norm, int64_t packs,
                       std::string_view adds, Stream stream) {
  const std::string more = concat(norm.means ? "true" : "false", ", ", packs, ", ", adds);
  return instance(stream, kWideRowsCu, name, {x.dtype(), narrow.dtype()}, more.c_str());
}
void* raw_or_null(const Tensor& x) { return x.defined() ? x.raw() : nullptr; }
bool is_absent_or_at_16(const Tensor& x) { return !x.defined() || begins_at_16(x.raw()); }

// Bytes in which the warps of a block keep sums of columns: for weights, biases and, with `sums`, what is narrow.
int64_t norm_room(DType dtype, DType narrow, int64_t packs, bool sums) {
  const auto bytes = [](DType type) { return static_cast<int64_t>(size_of(compute_of(type))); };
  const int64_t columns = packs * 32 * elems_per_pack(dtype);
  return kWarpsPerBlock * columns * (2 * bytes(dtype) + (sums ? bytes(narrow) : 0));
}
// Among how many blocks rows are shared out. Two blocks of a norm's gradient run on a multiprocessor.
int64_t chunks_of(int64_t rows, Device device) {
  return std::min(divided_up(rows, 2 * kWarpsPerBlock), int64_t{2} * chorale::cuda::multiprocessors(device));
}

}  // namespace

ColumnChunks column_chunks(const void* x, DType dtype, const MatrixRows& of, DType out, Device device) {
  const auto& [rows, columns, stride] = of;
  const int64_t per_pack = elems_per_pack(dtype);
  if (!is_floating(dtype) || !is_floating(out) || rows < 64 || stride % per_pack != 0 || !begins_at_16(x)) return {};
  return {divided_up(columns, 32 * per_pack), chunks_of(rows, device)};
}

void join_columns(const Tensor& partial, int64_t columns, double divisor, const Tensor& out, Stream stream) {
  launch(instance(stream, kWideRowsCu, "join_columns", {partial.dtype(), out.dtype()}),
         {.x = static_cast<unsigned>(divided_up(columns, 32)), .threads = 1024}, stream, partial.raw(), out.raw(),
         partial.size(0), columns, divisor);
}

bool sum_columns(const void* x, DType dtype, const MatrixRows& of, double divisor, const Tensor& out, Stream stream) {
  const auto& [rows, columns, stride] = of;
  const auto [tiles, chunks] = column_chunks(x, dtype, of, out.dtype(), stream.device);
  if (chunks == 0) return false;
  const Tensor partial = Tensor::empty({chunks, columns}, compute_of(dtype), stream.device);
  launch(instance(stream, kWideRowsCu, "sum_columns", {dtype}),
         {.x = static_cast<unsigned>(tiles), .y = static_cast<unsigned>(chunks)}, stream, x, partial.raw(), rows,
         columns, stride);
  join_columns(partial, columns, divisor, out, stream);
  return true;
}

bool normalize_wide(const Tensor& x, const RowNorm& norm, const Tensor& y, Stream stream, const Tensor& more,
                    const Tensor& sum) {
  const int64_t packs = packs_of(x, norm.n);
  if (packs == 0 || !begins_at_16(y.raw()) || !is_absent_or_at_16(more) || !is_absent_or_at_16(sum) ||
      !begins_at_16(norm.weight) || !begins_at_16(norm.bias))
    return false;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(divided_up(norm.rows, kWarpsPerBlock), 1 << 20));
  launch(norm_kernel("normalize_in_warps", x, y, norm, packs, more.defined() ? "true" : "false", stream), {.x = blocks},
         stream, x.raw(), raw_or_null(more), raw_or_null(sum), norm.weight, norm.bias, y.raw(), norm.means, norm.rstds,
         norm.rows, norm.n, norm.eps);
  return true;
}

bool normalize_backward_wide(const Tensor& dy, const Tensor& x, const RowNorm& norm, const Tensor& dx,
                             const Tensor& dweight, const Tensor& dbias, Stream stream, const Tensor& more,
                             const Tensor& lower, const Tensor& sums) {
  const int64_t packs = packs_of(x, norm.n);
  if (packs == 0 || norm.rows == 0 || !begins_at_16(dy.raw()) || !begins_at_16(dx.raw()) || !is_absent_or_at_16(more) ||
      !is_absent_or_at_16(lower) || !begins_at_16(norm.weight))
    return false;
  const int64_t room = norm_room(x.dtype(), dy.dtype(), packs, sums.defined());
  if (room + kOtherBytes > chorale::cuda::shared_bytes(stream.device)) return false;
  const int64_t blocks = chunks_of(norm.rows, stream.device);
  const Tensor partial =
      dweight.defined() ? Tensor::empty({blocks, 2, norm.n}, compute_of(x.dtype()), stream.device) : Tensor();
  const Tensor lower_partial =
      sums.defined() ? Tensor::empty({blocks, norm.n}, compute_of(dy.dtype()), stream.device) : Tensor();
  const std::string_view adds = sums.defined() ? "true, true" : lower.defined() ? "true, false" : "false, false";
  launch(norm_kernel("normalize_backward_in_warps", x, dy, norm, packs, adds, stream),
         {.x = static_cast<unsigned>(blocks), .shared_bytes = static_cast<unsigned>(room)}, stream, raw_or_null(more),
         dy.raw(), x.raw(), norm.means, norm.rstds, norm.weight, dx.raw(), raw_or_null(lower), raw_or_null(partial),
         raw_or_null(lower_partial), norm.rows, norm.n);
  if (!partial.defined() && sums.defined()) join_columns(lower_partial, norm.n, 1, sums, stream);
  if (!partial.defined()) return true;
  launch(instance(stream, kWideRowsCu, "join_norm_columns", {compute_of(x.dtype()), dy.dtype()}),
         {.x = static_cast<unsigned>(divided_up(norm.n, 32)), .y = sums.defined() ? 3u : 2u, .threads = 1024}, stream,
         partial.raw(), raw_or_null(dweight), raw_or_null(dbias), raw_or_null(lower_partial), raw_or_null(sums), blocks,
         norm.n);
  return true;
}

void add_narrow(const Tensor& x, const Tensor& more, const Tensor& sum, Stream stream) {
  if (sum.elems() == 0) return;
  launch(instance(stream, kWideRowsCu, "add_narrow", {sum.dtype(), more.dtype()}),
         {.x = blocks_for(stream.device, sum.elems())}, stream, x.raw(), more.raw(), sum.raw(), sum.elems());
}

namespace {
Grid loss_grid(int64_t rows) {
  return {.x = static_cast<unsigned>(std::clamp<int64_t>(rows, 1, 1 << 20)), .threads = 512};
}
}  // namespace

void cross_entropy_wide(const Tensor& x, const RowLoss& loss, const Tensor& lse, const Tensor& losses, Stream stream) {
  launch(instance(stream, kWideLossesCu, "cross_entropy_of_rows", {x.dtype()}), loss_grid(loss.rows), stream, x.raw(),
         loss.target, lse.raw(), losses.raw(), loss.rows, loss.classes, loss.x_row, loss.ignore_index,
         fault_of(stream.device), loss.op);
}

void cross_entropy_both_ways(const Tensor& dloss, const Tensor& x, const RowLoss& loss, const void* divisor,
                             Reduction reduction, const Tensor& lse, const Tensor& losses, const Tensor& dx,
                             Stream stream) {
  // Two blocks on a multiprocessor keep a row each; where rows are longer, those of three blocks (100 KiB for 50,304
  // classes) fit into the cache together.
  const Device device = stream.device;
  const int64_t row_bytes = loss.classes * static_cast<int64_t>(size_of(x.dtype()));
  const bool keeps = 2 * (row_bytes + kOtherBytes) <= chorale::cuda::shared_bytes(device);
  Grid grid = loss_grid(loss.rows);
  grid.x = std::min(grid.x, static_cast<unsigned>((keeps ? 2 : 3) * chorale::cuda::multiprocessors(device)));
  grid.shared_bytes = keeps ? static_cast<unsigned>(row_bytes) : 0;
  const int64_t each = reduction == Reduction::kNone ? 1 : 0;
  launch(instance(stream, kWideLossesCu, "cross_entropy_and_slopes", {x.dtype()}, keeps ? "true" : "false"), grid,
         stream, raw_or_null(dloss), x.raw(), loss.target, divisor, lse.raw(), losses.raw(), dx.raw(), loss.rows,
         loss.classes, loss.x_row, loss.dx_row, loss.ignore_index, each, fault_of(device), loss.op);
}

bool is_small(int64_t rows, int64_t classes) { return rows <= 1024 && rows * classes <= 1 << 15; }

void cross_entropy_small(const Tensor& x, const RowLoss& loss, Reduction reduction, const Tensor& lse,
                         const Tensor& out, Stream stream, const Tensor& dloss, const Tensor& dx) {
  const int64_t mean = reduction == Reduction::kMean ? 1 : 0, each = reduction == Reduction::kNone ? 1 : 0;
  const auto threads = static_cast<unsigned>(32 * std::clamp<int64_t>(loss.rows, 1, 32));
  launch(instance(stream, kWideLossesCu, "cross_entropy_in_one_block", {x.dtype()}), {.threads = threads}, stream,
         raw_or_null(dloss), x.raw(), loss.target, lse.raw(), out.raw(), raw_or_null(dx), loss.rows, loss.classes,
         loss.ignore_index, mean, each, fault_of(stream.device), loss.op);
}

void cross_entropy_backward_wide(const Tensor& dloss, const Tensor& x, const RowLoss& loss, const Tensor& lse,
                                 const void* divisor, Reduction reduction, const Tensor& dx, Stream stream) {
  const int64_t each = reduction == Reduction::kNone ? 1 : 0, mean = reduction == Reduction::kMean ? 1 : 0;
  Grid grid = loss_grid(loss.rows);
  if (loss.classes <= 1024) grid.threads = 128;
  launch(instance(stream, kWideLossesCu, "cross_entropy_backward_of_rows", {x.dtype()}), grid, stream, dloss.raw(),
         x.raw(), loss.target, lse.raw(), divisor, dx.raw(), loss.rows, loss.classes, loss.x_row, loss.dx_row,
         loss.ignore_index, each, mean, fault_of(stream.device), loss.op);
}

}  // namespace chorale::kernel::cuda
