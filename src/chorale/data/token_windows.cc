#include "chorale/data/token_windows.h"

#include <algorithm>

#include "chorale/op/view.h"

namespace chorale::data {
namespace {

std::span<const int32_t> elements(const std::vector<int32_t>& tokens) { return tokens; }
std::span<const uint16_t> elements(const io::TokenShard& shard) { return shard.tokens(); }
std::span<const uint8_t> elements(const std::shared_ptr<const io::MappedFile>& file) {
  return {reinterpret_cast<const uint8_t*>(file->bytes().data()), file->bytes().size()};
}

}  // namespace

TokenWindows::TokenWindows(Tokens tokens, int64_t window, int64_t stride)
    : tokens_(std::make_shared<const Tokens>(std::move(tokens))), window_(window), stride_(stride) {
  CHORALE_CHECK(window > 0 && stride > 0, "[TokenWindows] a window needs a length and a stride of at least 1, not ",
                window, " and ", stride);
  const int64_t count =
      std::visit([](const auto& source) { return static_cast<int64_t>(elements(source).size()); }, *tokens_);
  size_ = count <= window ? 0 : (count - 1 - window) / stride + 1;
}

Example TokenWindows::get(int64_t index) const {
  const Example batch = get_batch({&index, 1});
  return {select(batch.x, 0, 0), select(batch.y, 0, 0)};
}

Example TokenWindows::get_batch(std::span<const int64_t> indices) const {
  const Shape sizes{static_cast<int64_t>(indices.size()), window_};
  Example batch{Tensor::empty(sizes, DType::kI64), Tensor::empty(sizes, DType::kI64)};
  int64_t *x = batch.x.data<int64_t>(), *y = batch.y.data<int64_t>();
  std::visit(
      [&](const auto& source) {
        for (const int64_t index : indices) {
          CHORALE_CHECK(index >= 0 && index < size_, "[TokenWindows] there is no window ", index, " among ", size_);
          const auto tokens = elements(source).subspan(static_cast<size_t>(index * stride_));
          x = std::copy_n(tokens.begin(), window_, x);
          y = std::copy_n(tokens.begin() + 1, window_, y);
        }
      },
      *tokens_);
  return batch;
}

}  // namespace chorale::data
