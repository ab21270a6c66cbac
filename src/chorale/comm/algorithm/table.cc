#include "chorale/comm/algorithm/table.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <tuple>

#include "chorale/base/config.h"
#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

using Row = AlgorithmTable::Row;

// Up to here, copying a value into the slot beats the second exchange that reducing in place costs.
constexpr uint64_t kInPlaceFromBytes = (1 << 10) + 1;
// What fits into a slot goes there: it saves the wait until everybody has read it.
constexpr uint64_t kReadFromBytes = (16 << 10) + 1;
// Two hosts over one cable: above this, sending everything to every leader costs more than a second exchange.
constexpr uint64_t kShardsFromBytes = 32 << 10;

constexpr Row kBuiltIn[] = {
    {CallKind::kAllReduce, 0, Algorithm::kSlot},       {CallKind::kAllReduce, kInPlaceFromBytes, Algorithm::kInPlace},
    {CallKind::kReduce, 0, Algorithm::kSlot},          {CallKind::kReduce, kInPlaceFromBytes, Algorithm::kInPlace},
    {CallKind::kReduceScatter, 0, Algorithm::kSlot},   {CallKind::kReduceScatter, kReadFromBytes, Algorithm::kRead},
    {CallKind::kBroadcast, 0, Algorithm::kSlot},       {CallKind::kBroadcast, kReadFromBytes, Algorithm::kRead},
    {CallKind::kAllGather, 0, Algorithm::kSlot},       {CallKind::kAllGather, kReadFromBytes, Algorithm::kRead},
    {CallKind::kGather, 0, Algorithm::kSlot},          {CallKind::kGather, kReadFromBytes, Algorithm::kRead},
    {CallKind::kScatter, 0, Algorithm::kSlot},         {CallKind::kScatter, kReadFromBytes, Algorithm::kRead},
    {CallKind::kAllToAll, 0, Algorithm::kSlot},        {CallKind::kAllToAll, kReadFromBytes, Algorithm::kRead},

    {CallKind::kAllReduce, 0, Algorithm::kLeaders},    {CallKind::kAllReduce, kShardsFromBytes, Algorithm::kShards},
    {CallKind::kReduceScatter, 0, Algorithm::kDirect}, {CallKind::kReduceScatter, kShardsFromBytes, Algorithm::kShards},
};

// What can run what.
struct Ability {
  Algorithm algorithm;
  std::string_view name;
  bool between_hosts;
  std::initializer_list<CallKind> kinds;
};
const Ability kAbilities[] = {
    {Algorithm::kSlot,
     "slot",
     false,
     {CallKind::kAllReduce, CallKind::kReduce, CallKind::kReduceScatter, CallKind::kBroadcast, CallKind::kAllGather,
      CallKind::kGather, CallKind::kScatter, CallKind::kAllToAll}},
    {Algorithm::kRead,
     "read",
     false,
     {CallKind::kReduceScatter, CallKind::kBroadcast, CallKind::kAllGather, CallKind::kGather, CallKind::kScatter,
      CallKind::kAllToAll}},
    {Algorithm::kInPlace, "in_place", false, {CallKind::kAllReduce, CallKind::kReduce}},
    {Algorithm::kLeaders, "leaders", true, {CallKind::kAllReduce}},
    {Algorithm::kShards, "shards", true, {CallKind::kAllReduce, CallKind::kReduceScatter}},
    {Algorithm::kDirect, "direct", true, {CallKind::kAllReduce, CallKind::kReduceScatter}},
};
const Ability& ability_of(Algorithm algorithm) { return kAbilities[static_cast<size_t>(algorithm) - 1]; }

bool is_between_hosts(const Row& row) { return ability_of(row.algorithm).between_hosts; }
bool same_choice(const Row& a, const Row& b) { return a.kind == b.kind && is_between_hosts(a) == is_between_hosts(b); }

[[noreturn]] void refuse(std::string_view row, const std::string& why) {
  throw InvalidArgument(
      concat("[algorithms] cannot use '", row, "': ", why,
             "; a row is CALL:BYTES=ALGORITHM, such as all_reduce:65536=direct, and rows are separated by commas "
             "(CHORALE_ALGORITHMS; `chorale doctor` prints the table)"));
}

Row parse_row(std::string_view text) {
  const size_t colon = text.find(':'), equals = text.find('=');
  if (colon == std::string_view::npos || equals == std::string_view::npos || equals < colon)
    refuse(text, "it is no row");
  Row row{CallKind::kNone, 0, Algorithm::kNone};
  const std::string_view call = text.substr(0, colon), bytes = text.substr(colon + 1, equals - colon - 1),
                         name = text.substr(equals + 1);
  std::string names;
  for (const Ability& ability : kAbilities) {
    for (CallKind kind : ability.kinds) {
      if (call != name_of(kind)) continue;
      row.kind = kind;
      names += concat(names.empty() ? "" : ", ", ability.name);
      if (name == ability.name) row.algorithm = ability.algorithm;
    }
  }
  if (row.kind == CallKind::kNone) refuse(text, concat("there is no choice for a call '", call, "'"));
  if (row.algorithm == Algorithm::kNone) refuse(text, concat("the algorithms of ", call, " are ", names));
  const auto result = std::from_chars(bytes.data(), bytes.data() + bytes.size(), row.from_bytes);
  if (result.ec != std::errc() || result.ptr != bytes.data() + bytes.size())
    refuse(text, concat("'", bytes, "' is no number of bytes"));
  return row;
}

}  // namespace

std::string_view name_of(Algorithm algorithm) {
  return algorithm == Algorithm::kNone ? "none" : ability_of(algorithm).name;
}

AlgorithmTable AlgorithmTable::from_environment() { return parse(config::env("CHORALE_ALGORITHMS").value_or("")); }

AlgorithmTable AlgorithmTable::parse(std::string_view text) {
  std::vector<Row> rows;
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    rows.push_back(parse_row(text.substr(0, comma)));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  AlgorithmTable table;
  table.rows_ = rows;
  std::copy_if(std::begin(kBuiltIn), std::end(kBuiltIn), std::back_inserter(table.rows_), [&](const Row& row) {
    return std::none_of(rows.begin(), rows.end(), [&](const Row& named) { return same_choice(row, named); });
  });
  std::stable_sort(table.rows_.begin(), table.rows_.end(), [](const Row& a, const Row& b) {
    return std::tuple(a.kind, is_between_hosts(a), a.from_bytes) <
           std::tuple(b.kind, is_between_hosts(b), b.from_bytes);
  });
  for (size_t i = 0; i < table.rows_.size(); ++i) {
    Row& row = table.rows_[i];
    if (i == 0 || !same_choice(row, table.rows_[i - 1])) {
      row.from_bytes = 0;  // smaller sizes go its way
    } else if (row.algorithm == Algorithm::kSlot) {
      refuse(concat(name_of(row.kind), ":", row.from_bytes, "=slot"), "slots are for the smallest sizes");
    }
  }
  return table;
}

Algorithm AlgorithmTable::between_hosts(CallKind kind, uint64_t bytes) const {
  Algorithm chosen = Algorithm::kNone;
  for (const Row& row : rows_) {
    if (row.kind == kind && is_between_hosts(row) && row.from_bytes <= bytes) chosen = row.algorithm;
  }
  return chosen;
}

uint64_t AlgorithmTable::most_by_slot(CallKind kind) const {
  for (const Row& row : rows_) {
    if (row.kind == kind && !is_between_hosts(row) && row.algorithm != Algorithm::kSlot)
      return std::max<uint64_t>(row.from_bytes, 1) - 1;
  }
  return ~uint64_t{0};
}

std::string AlgorithmTable::text() const {
  std::string text;
  for (const Row& row : rows_)
    text += concat(text.empty() ? "" : ",", name_of(row.kind), ":", row.from_bytes, "=", name_of(row.algorithm));
  return text;
}

std::vector<std::string> AlgorithmTable::lines() const {
  std::vector<std::string> lines;
  for (size_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    const bool new_kind = i == 0 || rows_[i - 1].kind != row.kind;
    const bool new_place = new_kind || !same_choice(row, rows_[i - 1]);
    if (new_kind) lines.push_back(concat(name_of(row.kind), ":"));
    if (new_place) {
      lines.back() += concat(new_kind ? " " : "; ", is_between_hosts(row) ? "between hosts " : "on one host ",
                             name_of(row.algorithm));
    } else {
      lines.back() += concat(", from ", row.from_bytes, " bytes on ", name_of(row.algorithm));
    }
  }
  return lines;
}

}  // namespace chorale::comm
