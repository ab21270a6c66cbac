// WordPiece as BERT does it: text is simplified (lower case, no accents, unless the model is "cased"), cut at spaces
// and punctuation, and each word is the longest token that it begins with, then the longest that goes on ("##ing"), and
// so on. A word for which there are no such tokens becomes [UNK]. Files are BERT's own: `vocab.txt`, a token per line,
// and if it is there `tokenizer_config.json`.
//
// A WordPiece does not change; threads may share it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace chorale::text {

struct WordPieceOptions {
  bool lower_case = true;
  std::optional<bool> strip_accents{};  // nothing: as lower_case says
};

class WordPiece {
 public:
  using Id = int32_t;

  // Throw InvalidArgument, naming the file and what is wrong in it.
  static WordPiece load(const std::filesystem::path& folder);  // with vocab.txt
  static WordPiece parse(std::string_view vocab, const WordPieceOptions& options = {});
  // Writes vocab.txt and tokenizer_config.json into a folder, which is made if need be.
  void save(const std::filesystem::path& folder) const;

  Id size() const { return static_cast<Id>(tokens_.size()); }
  // Specials are never found in a text, but for [UNK]: what looks like one is cut at its brackets. Bytes that are not
  // UTF-8 are passed over.
  std::vector<Id> encode(std::string_view text) const;
  // Words with a space between them. Throws InvalidArgument for an id that is not in the vocabulary.
  std::string decode(std::span<const Id> ids) const;
  // The id of a token by its name, such as [MASK]; InvalidArgument when there is none.
  Id special(std::string_view name) const;
  const WordPieceOptions& options() const { return options_; }

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  using Ids = std::unordered_map<std::string, Id, Hash, std::equal_to<>>;

  WordPiece() = default;
  // The character as it is looked for.
  void append_simplified(std::u32string& text, uint32_t code) const;
  void add_word(std::u32string_view word, std::vector<Id>& out) const;

  WordPieceOptions options_;
  std::vector<std::string> tokens_;  // by id
  Ids first_, later_;                // tokens that begin a word; those that go on, without ##
  size_t longest_ = 0;               // bytes of the longest token
  Id unknown_ = 0;
};

}  // namespace chorale::text
