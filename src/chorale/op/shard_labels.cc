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

std::string spell_out(const OpDef& op, const std::string& labels, int64_t dims) {
  std::string result = labels;
  if (const size_t dots = labels.find("..."); dots != std::string::npos) {
    const int64_t named = static_cast<int64_t>(labels.size()) - 3;
    CHORALE_CHECK(dims >= named, "[", op.name, "] sharding labels '", labels, "' name ", named,
                  " dimensions, but there are ", dims);
    // Aligned from the right, as broadcasting is.
    result.replace(dots, 3, kSpareLetters.substr(kSpareLetters.size() - static_cast<size_t>(dims - named)));
  }
  CHORALE_CHECK(static_cast<int64_t>(result.size()) == dims, "[", op.name, "] sharding labels '", labels,
                "' do not fit the number of dimensions, ", dims);
  for (char c : result) {
    CHORALE_CHECK(std::isalnum(static_cast<unsigned char>(c)), "[", op.name, "] sharding label '", c, "' is no letter");
  }
  return result;
}

// The dimensions of the result, aligned from the right.
ShardLabels elementwise(std::span<const int64_t> in_dims, std::span<const int64_t> out_dims) {
  ShardLabels labels;
  const auto last = [](int64_t dims) {
    return std::string(kSpareLetters.substr(kSpareLetters.size() - static_cast<size_t>(std::max<int64_t>(dims, 0))));
  };
  for (int64_t dims : in_dims) labels.in.push_back(last(dims));
  for (int64_t dims : out_dims) labels.out.push_back(last(dims));
  return labels;
}

}  // namespace

ShardLabels shard_labels(const OpDef& op, const Attrs& attrs, std::span<const int64_t> in_dims,
                         std::span<const int64_t> out_dims) {
  const std::string text = op.shard.labels_of ? op.shard.labels_of(attrs, in_dims)
                           : op.shard.labels  ? op.shard.labels
                                              : "";
  if (text == "elementwise") return elementwise(in_dims, out_dims);
  const size_t arrow = text.find("->");
  CHORALE_CHECK(arrow != std::string::npos, "[", op.name, "] sharding rule '", text, "' has no '->'");
  std::vector<std::string> in = split(std::string_view(text).substr(0, arrow));
  std::vector<std::string> out = split(std::string_view(text).substr(arrow + 2));
  if (in_dims.empty() && in.size() == 1 && in[0].empty()) in.clear();
  CHORALE_CHECK(in.size() == in_dims.size(), "[", op.name, "] sharding rule '", text, "' has ", in.size(),
                " operands, the call has ", in_dims.size());
  CHORALE_CHECK(out.size() == out_dims.size(), "[", op.name, "] sharding rule '", text, "' has ", out.size(),
                " results, the call has ", out_dims.size());
  ShardLabels labels;
  for (size_t i = 0; i < in.size(); ++i) labels.in.push_back(in_dims[i] < 0 ? "" : spell_out(op, in[i], in_dims[i]));
  for (size_t i = 0; i < out.size(); ++i) labels.out.push_back(spell_out(op, out[i], out_dims[i]));
  return labels;
}

}  // namespace chorale::op
