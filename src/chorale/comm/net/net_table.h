// Inside comm: which way a reduction between hosts goes, by its size.
//
//   leaders   each host's values meet at its leader, leaders send each other all they have: one exchange
//   shards    each rail reduces its part of the data, cut among the hosts: least data between hosts. Only where sums
//             by host follow the tree of all sums (net_layout.h); direct otherwise
//   direct    each rank reduces its slice of everybody's data
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chorale/comm/call.h"
#include "chorale/comm/net/net_layout.h"

namespace chorale::comm {

enum class NetAlgorithm : uint8_t { kNone, kLeaders, kShards, kDirect };
std::string_view name_of(NetAlgorithm algorithm);

class NetTable {
 public:
  struct Row {
    CallKind kind;
    uint64_t from_bytes;  // to the next row of the same kind
    NetAlgorithm algorithm;
  };

  // The table that is built in, with the rows of CHORALE_ALGORITHMS in place of it for the calls that it names:
  // "all_reduce:0=leaders,all_reduce:65536=direct". Throws InvalidArgument that shows what is wrong.
  static NetTable from_environment();
  static NetTable parse(std::string_view rows);

  NetAlgorithm choose(CallKind kind, uint64_t bytes, const NetLayout& layout) const;
  // In the form that parse() takes.
  std::string text() const;

 private:
  std::vector<Row> rows_;  // by kind, then by size
};

}  // namespace chorale::comm
