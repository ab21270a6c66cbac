// The tokenizers that jobs on text can use, behind one type.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chorale/text/bpe.h"

namespace chorale::train {

class Tokenizer {
 public:
  // A token is a byte; specials, which no text gives, follow the 256 bytes.
  static Tokenizer bytes(std::vector<std::string> specials = {});
  static Tokenizer bpe(text::Bpe bpe) { return Tokenizer(std::move(bpe)); }
  // Of a folder that save() wrote, or of one of GPT-2's: with vocab.json and merges.txt, else bytes.
  static Tokenizer load(const std::filesystem::path& folder, std::vector<std::string> specials = {});
  void save(const std::filesystem::path& folder) const;

  int32_t size() const;
  std::vector<int32_t> encode(std::string_view text) const;
  std::string decode(std::span<const int32_t> ids) const;
  // InvalidArgument when there is none of this name.
  int32_t special(std::string_view name) const;
  std::string describe() const;

 private:
  explicit Tokenizer(std::optional<text::Bpe> bpe) : bpe_(std::move(bpe)) {}

  std::optional<text::Bpe> bpe_;  // nothing: bytes
  std::vector<std::string> specials_;
};

// Bytes of text that come in pieces, as whole UTF-8 characters: what may become one is held back, what cannot is
// replaced by U+FFFD.
class Utf8Pieces {
 public:
  std::string add(std::string_view bytes);
  // What is left.
  std::string finish();

 private:
  std::string held_;
};
// All at once.
std::string as_utf8(std::string_view bytes);

}  // namespace chorale::train
