#include "chorale/text/bpe.h"

#include <queue>

#include "chorale/base/did_you_mean.h"
#include "chorale/base/error.h"
#include "chorale/text/words.h"

namespace chorale::text {

// Joins neighbours, the smallest rank first and of equal ones the leftmost. The parts of the piece are a linked list,
// and a heap has the pairs that may be joined; entries whose parts have changed meanwhile are skipped. So a piece of n
// bytes costs n log n, however long it is.
void Bpe::join(std::string_view piece, std::vector<Id>& out) const {
  struct Part {
    Id id;  // -1: joined to the part before it
    int32_t before, behind;
  };
  struct Candidate {
    int32_t rank, left;
    Id left_id, right_id;
    bool operator>(const Candidate& other) const { return rank != other.rank ? rank > other.rank : left > other.left; }
  };
  const auto count = static_cast<int32_t>(piece.size());
  std::vector<Part> parts(piece.size());
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
  const auto consider = [&](int32_t left) {
    if (left < 0 || parts[static_cast<size_t>(left)].behind == count) return;
    const Id left_id = parts[static_cast<size_t>(left)].id;
    const Id right_id = parts[static_cast<size_t>(parts[static_cast<size_t>(left)].behind)].id;
    if (const auto found = merges_.find(pair_of(left_id, right_id)); found != merges_.end()) {
      candidates.push({found->second.rank, left, left_id, right_id});
    }
  };
  for (int32_t i = 0; i < count; ++i) {
    parts[static_cast<size_t>(i)] = {byte_ids_[static_cast<uint8_t>(piece[static_cast<size_t>(i)])], i - 1, i + 1};
  }
  for (int32_t i = 0; i + 1 < count; ++i) consider(i);
  while (!candidates.empty()) {
    const Candidate best = candidates.top();
    candidates.pop();
    Part& left = parts[static_cast<size_t>(best.left)];
    if (left.id != best.left_id || left.behind == count) continue;
    Part& right = parts[static_cast<size_t>(left.behind)];
    if (right.id != best.right_id) continue;
    left.id = merges_.find(pair_of(best.left_id, best.right_id))->second.joined;
    left.behind = right.behind;
    right.id = -1;
    if (left.behind != count) parts[static_cast<size_t>(left.behind)].before = best.left;
    consider(left.before);
    consider(best.left);
  }
  for (int32_t i = 0; i != count; i = parts[static_cast<size_t>(i)].behind) {
    out.push_back(parts[static_cast<size_t>(i)].id);
  }
}

std::vector<Bpe::Id> Bpe::encode(std::string_view text) const {
  // Few pieces make up most of a text: each is joined once and then copied. Rare long ones would only fill the memory.
  constexpr size_t kMostRemembered = 1 << 16, kLongestRemembered = 64;
  struct Range {
    size_t begin, end;
  };
  std::unordered_map<std::string_view, Range> known;  // where in `ids` a piece was put first
  std::vector<Id> ids;
  for_each_piece(text, [&](std::string_view piece) {
    if (const auto found = known.find(piece); found != known.end()) {
      for (size_t i = found->second.begin; i < found->second.end; ++i) ids.push_back(ids[i]);
      return;
    }
    CHORALE_CHECK(piece.size() < (size_t{1} << 31), "[Bpe] a word of ", piece.size(), " bytes is too long");
    const size_t begin = ids.size();
    join(piece, ids);
    if (known.size() < kMostRemembered && piece.size() <= kLongestRemembered)
      known.emplace(piece, Range{begin, ids.size()});
  });
  return ids;
}

std::string Bpe::decode(std::span<const Id> ids) const {
  std::string text;
  for (const Id id : ids) text += token(id);
  return text;
}

const std::string& Bpe::token(Id id) const {
  CHORALE_CHECK(id >= 0 && id < size(), "[Bpe] there is no token ", id, " in a vocabulary of ", size());
  return tokens_[static_cast<size_t>(id)];
}

Bpe::Id Bpe::special(std::string_view name) const {
  const auto found = specials_.find(std::string(name));
  if (found == specials_.end()) {
    std::vector<std::string> names;
    for (const auto& [known, id] : specials_) names.push_back(known);
    detail::raise<InvalidArgument>("[Bpe] there is no special token '", name, "'", did_you_mean(name, names));
  }
  return found->second;
}

}  // namespace chorale::text
