#include "chorale/kernel/cuda/family.h"

#include <algorithm>
#include <atomic>

namespace chorale::kernel::cuda {
namespace {

std::atomic<RowNumber> number_of_row{nullptr};

}  // namespace

CUfunction instance(Stream stream, std::string_view text, const char* name, std::initializer_list<DType> types,
                    const char* more) {
  std::string whole = name;
  whole += '<';
  bool first = true;
  for (const DType type : types) {
    if (!first) whole += ", ";
    first = false;
    whole += chorale::cuda::type_in_text(type);
  }
  if (more) {
    if (!first) whole += ", ";
    whole += more;
  }
  whole += '>';
  return chorale::cuda::find_kernel(stream.device, whole, [&] {
    std::string joined(chorale::cuda::prelude());
    joined += text;
    return chorale::cuda::KernelText{std::move(joined), whole};
  });
}

void set_row_number(RowNumber number) { number_of_row.store(number); }
int64_t row_number(const KernelArgs& args) {
  const RowNumber number = number_of_row.load(std::memory_order_relaxed);
  return number && args.row ? number(args) : 0;
}

unsigned row_threads(int64_t n) { return static_cast<unsigned>(std::clamp<int64_t>((n + 31) / 32 * 32, 32, 1024)); }

Drawn drawn_for(const Tensor& stretch, const Shape& sizes) {
  const auto count = static_cast<size_t>(stretch.elems());
  CHORALE_CHECK(count == 2 || count == 2 + 2 * sizes.size(), "[random] a stretch for a tensor of shape ", sizes,
                " has 2 or ", 2 + 2 * sizes.size(), " elements, not ", count);
  Drawn drawn;
  drawn.stretch = static_cast<const int64_t*>(stretch.raw());
  drawn.step = stretch.stride(0);
  drawn.placed = count > 2 ? 1 : 0;
  drawn.dims = static_cast<int64_t>(sizes.size());
  for (size_t d = 0; d < sizes.size(); ++d) drawn.sizes[d] = sizes[d];
  return drawn;
}

}  // namespace chorale::kernel::cuda
