// Byte-pair encoding as GPT-2 does it: text is cut into pieces (words.h), a piece starts as single bytes, and
// neighbours are joined in the order in which training found them most often. Every text, and every string of bytes,
// can be encoded, and decoding gives exactly it back. Files are GPT-2's own: `vocab.json` and `merges.txt`.
//
// A Bpe does not change; threads may share it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace chorale::text {

struct BpeTraining {
  int32_t vocab_size = 8192;            // at most: bytes, merges and specials together; at least 256 and the specials
  int64_t min_count = 2;                // a pair that is found less often is not joined
  std::vector<std::string> specials{};  // tokens that no text gives, such as <|endoftext|>; they get the last ids
};

class Bpe {
 public:
  using Id = int32_t;

  // Learns from a text. The same text gives the same vocabulary: of pairs found equally often, the one with the smaller
  // ids is joined first.
  static Bpe train(std::string_view text, const BpeTraining& options = {});

  // Throw InvalidArgument, naming the file and what is wrong in it.
  static Bpe load(const std::filesystem::path& folder);  // with vocab.json and merges.txt
  static Bpe load(const std::filesystem::path& vocab, const std::filesystem::path& merges);
  static Bpe parse(std::string_view vocab, std::string_view merges);
  // Writes vocab.json and merges.txt into a folder, which is made if need be.
  void save(const std::filesystem::path& folder) const;

  Id size() const { return static_cast<Id>(tokens_.size()); }
  // Specials are never found in a text: what looks like one is encoded as any text is.
  std::vector<Id> encode(std::string_view text) const;
  // Specials give their name. Throws InvalidArgument for an id that is not in the vocabulary.
  std::string decode(std::span<const Id> ids) const;

  // The bytes of a token.
  const std::string& token(Id id) const;
  // The id of a special; InvalidArgument when there is none of this name.
  Id special(std::string_view name) const;

 private:
  using Pair = uint64_t;
  static constexpr Pair pair_of(Id left, Id right) {
    return static_cast<Pair>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  struct Merge {
    int32_t rank;  // the earlier it was found, the smaller
    Id joined;
  };
  friend class BpeTrainer;

  Bpe() = default;
  void join(std::string_view piece, std::vector<Id>& out) const;

  std::vector<std::string> tokens_;               // by id: bytes, or the name of a special
  std::unordered_map<std::string, Id> specials_;  // by name
  Id byte_ids_[256] = {};
  std::unordered_map<Pair, Merge> merges_;
};

// GPT-2's files are text, so each byte has a printable character: itself where it has one, else one from U+0100 on.
uint32_t printable_of_byte(uint8_t byte);
std::string printable(std::string_view bytes);

}  // namespace chorale::text
