// The tokenizers that jobs on text can use, behind one type.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "chorale/text/bpe.h"
#include "chorale/text/wordpiece.h"

namespace chorale::train {

class Tokenizer {
 public:
  // A token is a byte; specials, which no text gives, follow the 256 bytes.
  static Tokenizer bytes(std::vector<std::string> specials = {});
  static Tokenizer bpe(text::Bpe bpe) { return Tokenizer(std::move(bpe)); }
  // Loads the tokenizer in a model's folder: GPT-2's (vocab.json and merges.txt), BERT's (vocab.txt), or one that
  // save() wrote.
  static Tokenizer load(const std::filesystem::path& folder);
  // Whether the folder has files of a tokenizer. Bytes need none: load() gives them where there are none.
  static bool is_in(const std::filesystem::path& folder);
  void save(const std::filesystem::path& folder) const;

  int32_t size() const;
  std::vector<int32_t> encode(std::string_view text) const;
  std::string decode(std::span<const int32_t> ids) const;
  // InvalidArgument when there is none of this name.
  int32_t special(std::string_view name) const;
  std::string describe() const;

 private:
  struct BytesAndSpecials {
    std::vector<std::string> specials;

    int32_t size() const;
    std::vector<int32_t> encode(std::string_view text) const;
    std::string decode(std::span<const int32_t> ids) const;
    int32_t special(std::string_view name) const;
    void save(const std::filesystem::path&) const {}
  };
  using Kind = std::variant<BytesAndSpecials, text::Bpe, text::WordPiece>;
  explicit Tokenizer(Kind kind) : kind_(std::move(kind)) {}

  Kind kind_;
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
