#include <algorithm>
#include <queue>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/text/bpe.h"
#include "chorale/text/words.h"

namespace chorale::text {

// Every different piece of the text is kept once, with its count, as the ids that it consists of at the moment. For
// each pair of neighbours the trainer knows how often it occurs and which pieces have it; joining a pair then touches
// only those pieces. A heap orders the pairs; an entry whose count is out of date is put back with the right one when
// it comes up.
class BpeTrainer {
 public:
  using Id = Bpe::Id;
  using Pair = Bpe::Pair;

  BpeTrainer(std::string_view text, const BpeTraining& options) : options_(options) {
    const auto wanted = static_cast<int64_t>(options.vocab_size) - static_cast<int64_t>(options.specials.size());
    CHORALE_CHECK(wanted >= 256, "[Bpe] a vocabulary of ", options.vocab_size, " has no room for 256 bytes and ",
                  options.specials.size(), " specials");
    add_bytes();
    count_pieces(text);
    for (size_t i = 0; i < pieces_.size(); ++i) add_pairs(i, [](Pair) { return true; });
    for (const auto& [pair, place] : places_) queue_.push({place.count, pair});
    while (static_cast<int64_t>(bpe_.tokens_.size()) < wanted && join_most_frequent()) {
    }
    add_specials();
  }

  Bpe take() { return std::move(bpe_); }

 private:
  struct Piece {
    std::vector<Id> ids;
    int64_t count = 0;
    size_t touched_by = 0;  // the last merge that looked at it
  };
  struct Place {
    int64_t count = 0;
    std::vector<uint32_t> pieces;  // those that have the pair, and maybe some that had it
  };
  struct Entry {
    int64_t count;
    Pair pair;
    bool operator<(const Entry& other) const { return count != other.count ? count < other.count : pair > other.pair; }
  };

  // Bytes are added in the order of their printable characters, as GPT-2's vocabulary has them.
  void add_bytes() {
    std::vector<uint8_t> bytes(256);
    for (size_t i = 0; i < 256; ++i) bytes[i] = static_cast<uint8_t>(i);
    std::sort(bytes.begin(), bytes.end(),
              [](uint8_t a, uint8_t b) { return printable_of_byte(a) < printable_of_byte(b); });
    for (const uint8_t byte : bytes) {
      bpe_.byte_ids_[byte] = static_cast<Id>(bpe_.tokens_.size());
      ids_.emplace(std::string(1, static_cast<char>(byte)), bpe_.byte_ids_[byte]);
      bpe_.tokens_.emplace_back(1, static_cast<char>(byte));
    }
  }

  void count_pieces(std::string_view text) {
    std::unordered_map<std::string_view, size_t> known;
    for_each_piece(text, [&](std::string_view piece) {
      const auto [found, is_new] = known.emplace(piece, pieces_.size());
      if (is_new) {
        Piece& added = pieces_.emplace_back();
        for (const char c : piece) added.ids.push_back(bpe_.byte_ids_[static_cast<uint8_t>(c)]);
      }
      ++pieces_[found->second].count;
    });
    CHORALE_CHECK(pieces_.size() < (size_t{1} << 32), "[Bpe] the text has too many different words");
  }

  // Counts the pairs of a piece, and notes it for those that are new to it.
  template <class IsNew>
  void add_pairs(size_t index, IsNew&& is_new) {
    const Piece& piece = pieces_[index];
    for (size_t i = 0; i + 1 < piece.ids.size(); ++i) {
      const Pair pair = Bpe::pair_of(piece.ids[i], piece.ids[i + 1]);
      Place& place = places_[pair];
      place.count += piece.count;
      if (is_new(pair)) place.pieces.push_back(static_cast<uint32_t>(index));
    }
  }
  void subtract_pairs(const Piece& piece) {
    for (size_t i = 0; i + 1 < piece.ids.size(); ++i) {
      places_[Bpe::pair_of(piece.ids[i], piece.ids[i + 1])].count -= piece.count;
    }
  }

  bool join_most_frequent() {
    while (!queue_.empty()) {
      const Entry best = queue_.top();
      queue_.pop();
      const int64_t count = places_[best.pair].count;
      if (count < options_.min_count || count <= 0) continue;
      if (count == best.count) {
        join(best.pair);
        return true;
      }
      if (count < best.count) queue_.push({count, best.pair});  // a larger one is in the queue already
    }
    return false;
  }

  void join(Pair pair) {
    const auto left = static_cast<Id>(pair >> 32), right = static_cast<Id>(pair & 0xffffffff);
    std::string bytes = bpe_.tokens_[static_cast<size_t>(left)] + bpe_.tokens_[static_cast<size_t>(right)];
    // "ab" + "c" and "a" + "bc" are one token. A pair with it may have been joined before; it keeps its rank.
    const auto [found, is_new] = ids_.emplace(bytes, static_cast<Id>(bpe_.tokens_.size()));
    if (is_new) bpe_.tokens_.push_back(std::move(bytes));
    const Id joined = found->second;
    bpe_.merges_.emplace(pair, Bpe::Merge{static_cast<int32_t>(bpe_.merges_.size()), joined});

    const auto has_joined = [&](Pair other) {
      return static_cast<Id>(other >> 32) == joined || static_cast<Id>(other & 0xffffffff) == joined;
    };
    const size_t turn = ++turns_;
    std::vector<Pair> grown;
    for (const uint32_t index : std::exchange(places_[pair].pieces, {})) {
      Piece& piece = pieces_[index];
      if (std::exchange(piece.touched_by, turn) == turn) continue;
      subtract_pairs(piece);
      size_t to = 0;
      for (size_t from = 0; from < piece.ids.size(); ++to) {
        const bool here = from + 1 < piece.ids.size() && piece.ids[from] == left && piece.ids[from + 1] == right;
        piece.ids[to] = here ? joined : piece.ids[from];
        from += here ? 2 : 1;
      }
      piece.ids.resize(to);
      add_pairs(index, [&](Pair other) {
        if (!has_joined(other)) return false;
        grown.push_back(other);
        return true;
      });
    }
    std::sort(grown.begin(), grown.end());
    grown.erase(std::unique(grown.begin(), grown.end()), grown.end());
    for (const Pair other : grown) queue_.push({places_[other].count, other});
  }

  void add_specials() {
    for (const std::string& name : options_.specials) {
      const bool taken = std::any_of(ids_.begin(), ids_.end(), [&](const auto& token) {
        return token.first == name || printable(token.first) == name;
      });
      CHORALE_CHECK(!name.empty() && !taken, "[Bpe] the special '", name, "' is a token of the text too");
      CHORALE_CHECK(bpe_.specials_.emplace(name, static_cast<Id>(bpe_.tokens_.size())).second, "[Bpe] the special '",
                    name, "' is listed twice");
      bpe_.tokens_.push_back(name);
    }
  }

  const BpeTraining& options_;
  Bpe bpe_;
  std::unordered_map<std::string, Id> ids_;  // by bytes
  std::vector<Piece> pieces_;
  std::unordered_map<Pair, Place> places_;
  std::priority_queue<Entry> queue_;
  size_t turns_ = 0;
};

Bpe Bpe::train(std::string_view text, const BpeTraining& options) { return BpeTrainer(text, options).take(); }

}  // namespace chorale::text
