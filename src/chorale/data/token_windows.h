// Text as examples for a language model: windows of tokens, and the same one token later.
#pragma once

#include <variant>

#include "chorale/data/dataset.h"
#include "chorale/io/file.h"
#include "chorale/io/tokens.h"

namespace chorale::data {

class TokenWindows {
 public:
  // What a tokenizer made; a shard, on its mapped file; or any file, whose bytes are tokens 0 … 255.
  using Tokens = std::variant<std::vector<int32_t>, io::TokenShard, std::shared_ptr<const io::MappedFile>>;

  // Window i begins at token i * stride. Without a stride, windows follow each other without overlap. Tokens behind the
  // last whole window are left out.
  TokenWindows(Tokens tokens, int64_t window, int64_t stride);
  TokenWindows(Tokens tokens, int64_t window) : TokenWindows(std::move(tokens), window, window) {}

  int64_t size() const { return size_; }
  // x: i64 [window]; y: the same tokens one place later.
  Example get(int64_t index) const;
  Example get_batch(std::span<const int64_t> indices) const;

 private:
  std::shared_ptr<const Tokens> tokens_;
  int64_t window_, stride_, size_;
};

}  // namespace chorale::data
