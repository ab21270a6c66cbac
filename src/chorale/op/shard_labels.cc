#include "chorale/op/shard_labels.h"

#include <algorithm>
#include <string_view>

#include "chorale/base/error.h"

namespace chorale::op {
namespace {

// Stand for the dimensions behind "..."; rules use the letters of the alphabet.
constexpr std::string_view kSpareLetters = "01234567";

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else if (c != ' ') {
      parts.back() += c;
    }
  }
  return parts;
}

std::string spell_out(const OpDef& op, const std::string& labels, int64_t rank) {
  std::string result = labels;
  if (const size_t dots = labels.find("..."); dots != std::string::npos) {
    const int64_t named = static_cast<int64_t>(labels.size()) - 3;
    CHORALE_CHECK(rank >= named, "[", op.name, "] sharding labels '", labels, "' name ", named,
                  " dimensions, but the rank is ", rank);
    // Aligned from the right, as broadcasting is.
    result.replace(dots, 3, kSpareLetters.substr(kSpareLetters.size() - static_cast<size_t>(rank - named)));
  }
  CHORALE_CHECK(static_cast<int64_t>(result.size()) == rank, "[", op.name, "] sharding labels '", labels,
                "' do not fit rank ", rank);
  for (char c : result) {
    CHORALE_CHECK(std::isalnum(static_cast<unsigned char>(c)), "[", op.name, "] sharding label '", c, "' is no letter");
  }
  return result;
}

// The dimensions of the result, aligned from the right.
ShardLabels elementwise(std::span<const int64_t> in_ranks, std::span<const int64_t> out_ranks) {
  ShardLabels labels;
  const auto last = [](int64_t rank) {
    return std::string(kSpareLetters.substr(kSpareLetters.size() - static_cast<size_t>(std::max<int64_t>(rank, 0))));
  };
  for (int64_t rank : in_ranks) labels.in.push_back(last(rank));
  for (int64_t rank : out_ranks) labels.out.push_back(last(rank));
  return labels;
}

}  // namespace

ShardLabels shard_labels(const OpDef& op, const Attrs& attrs, std::span<const int64_t> in_ranks,
                         std::span<const int64_t> out_ranks) {
  const std::string text = op.shard.labels_of ? op.shard.labels_of(attrs, in_ranks)
                           : op.shard.labels  ? op.shard.labels
                                              : "";
  if (text == "elementwise") return elementwise(in_ranks, out_ranks);
  const size_t arrow = text.find("->");
  CHORALE_CHECK(arrow != std::string::npos, "[", op.name, "] sharding rule '", text, "' has no '->'");
  std::vector<std::string> in = split(std::string_view(text).substr(0, arrow));
  std::vector<std::string> out = split(std::string_view(text).substr(arrow + 2));
  if (in_ranks.empty() && in.size() == 1 && in[0].empty()) in.clear();
  CHORALE_CHECK(in.size() == in_ranks.size(), "[", op.name, "] sharding rule '", text, "' has ", in.size(),
                " operands, the call has ", in_ranks.size());
  CHORALE_CHECK(out.size() == out_ranks.size(), "[", op.name, "] sharding rule '", text, "' has ", out.size(),
                " results, the call has ", out_ranks.size());
  ShardLabels labels;
  for (size_t i = 0; i < in.size(); ++i) labels.in.push_back(in_ranks[i] < 0 ? "" : spell_out(op, in[i], in_ranks[i]));
  for (size_t i = 0; i < out.size(); ++i) labels.out.push_back(spell_out(op, out[i], out_ranks[i]));
  return labels;
}

}  // namespace chorale::op
