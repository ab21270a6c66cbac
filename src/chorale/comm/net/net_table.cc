#include "chorale/comm/net/net_table.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <tuple>

#include "chorale/base/config.h"
#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

// Two hosts over one cable: above this, sending everything to every leader costs more than a second exchange.
constexpr uint64_t kShardsFromBytes = 32 << 10;

const NetTable::Row kBuiltIn[] = {
    {CallKind::kAllReduce, 0, NetAlgorithm::kLeaders},
    {CallKind::kAllReduce, kShardsFromBytes, NetAlgorithm::kShards},
    {CallKind::kReduceScatter, 0, NetAlgorithm::kDirect},
    {CallKind::kReduceScatter, kShardsFromBytes, NetAlgorithm::kShards},
};
constexpr CallKind kKinds[] = {CallKind::kAllReduce, CallKind::kReduceScatter};
constexpr NetAlgorithm kAlgorithms[] = {NetAlgorithm::kLeaders, NetAlgorithm::kShards, NetAlgorithm::kDirect};

[[noreturn]] void refuse(std::string_view row) {
  throw InvalidArgument(concat(
      "[algorithms] cannot read '", row,
      "'; a row is CALL:BYTES=ALGORITHM, such as all_reduce:65536=direct, rows are separated by commas, the call "
      "is all_reduce or reduce_scatter, and algorithms are leaders (of all_reduce only), shards and direct "
      "(CHORALE_ALGORITHMS)"));
}

NetTable::Row parse_row(std::string_view text) {
  const size_t colon = text.find(':'), equals = text.find('=');
  if (colon == std::string_view::npos || equals == std::string_view::npos || equals < colon) refuse(text);
  NetTable::Row row{CallKind::kNone, 0, NetAlgorithm::kNone};
  for (CallKind kind : kKinds) {
    if (text.substr(0, colon) == name_of(kind)) row.kind = kind;
  }
  const std::string_view bytes = text.substr(colon + 1, equals - colon - 1);
  const auto result = std::from_chars(bytes.data(), bytes.data() + bytes.size(), row.from_bytes);
  for (NetAlgorithm algorithm : kAlgorithms) {
    if (text.substr(equals + 1) == name_of(algorithm)) row.algorithm = algorithm;
  }
  if (row.kind == CallKind::kNone || row.algorithm == NetAlgorithm::kNone || result.ec != std::errc() ||
      result.ptr != bytes.data() + bytes.size() ||
      (row.kind == CallKind::kReduceScatter && row.algorithm == NetAlgorithm::kLeaders))
    refuse(text);
  return row;
}

}  // namespace

std::string_view name_of(NetAlgorithm algorithm) {
  switch (algorithm) {
    case NetAlgorithm::kLeaders:
      return "leaders";
    case NetAlgorithm::kShards:
      return "shards";
    case NetAlgorithm::kDirect:
      return "direct";
    case NetAlgorithm::kNone:
      break;
  }
  return "none";
}

NetTable NetTable::from_environment() { return parse(config::env("CHORALE_ALGORITHMS").value_or("")); }

NetTable NetTable::parse(std::string_view rows) {
  NetTable table;
  while (!rows.empty()) {
    const size_t comma = std::min(rows.find(','), rows.size());
    table.rows_.push_back(parse_row(rows.substr(0, comma)));
    rows.remove_prefix(std::min(comma + 1, rows.size()));
  }
  for (CallKind kind : kKinds) {
    const auto is_of_kind = [&](const Row& row) { return row.kind == kind; };
    if (std::none_of(table.rows_.begin(), table.rows_.end(), is_of_kind))
      std::copy_if(std::begin(kBuiltIn), std::end(kBuiltIn), std::back_inserter(table.rows_), is_of_kind);
  }
  std::stable_sort(table.rows_.begin(), table.rows_.end(), [](const Row& a, const Row& b) {
    return std::tie(a.kind, a.from_bytes) < std::tie(b.kind, b.from_bytes);
  });
  // Sizes below the first row of a kind go its way.
  for (size_t i = 0; i < table.rows_.size(); ++i) {
    if (i == 0 || table.rows_[i].kind != table.rows_[i - 1].kind) table.rows_[i].from_bytes = 0;
  }
  return table;
}

NetAlgorithm NetTable::choose(CallKind kind, uint64_t bytes, const NetLayout& layout) const {
  NetAlgorithm chosen = NetAlgorithm::kNone;
  for (const Row& row : rows_) {
    if (row.kind == kind && row.from_bytes <= bytes) chosen = row.algorithm;
  }
  return chosen == NetAlgorithm::kShards && !layout.follows_tree ? NetAlgorithm::kDirect : chosen;
}

std::string NetTable::text() const {
  std::string text;
  for (const Row& row : rows_)
    text += concat(text.empty() ? "" : ",", name_of(row.kind), ":", row.from_bytes, "=", name_of(row.algorithm));
  return text;
}

}  // namespace chorale::comm
