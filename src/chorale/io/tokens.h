// Token shards as llm.c keeps them (.bin): a header of 256 i32 (magic 20240520, version 1, number of tokens), then the
// tokens, 16 bits each.
#pragma once

#include "chorale/io/file.h"

namespace chorale::io {

// A shard on the mapped file.
class TokenShard {
 public:
  // Throws InvalidArgument, naming the file, when header and length do not agree.
  explicit TokenShard(const std::filesystem::path& path);

  std::span<const uint16_t> tokens() const { return tokens_; }

 private:
  std::shared_ptr<const MappedFile> file_;
  std::span<const uint16_t> tokens_;
};

// `bytes` must be aligned for 32 bits, as a mapping is.
std::span<const uint16_t> parse_token_shard(const std::string& what, std::span<const std::byte> bytes);
// Writes atomically; at most 2^31 - 1 tokens.
void save_token_shard(const std::filesystem::path& path, std::span<const uint16_t> tokens);

}  // namespace chorale::io
