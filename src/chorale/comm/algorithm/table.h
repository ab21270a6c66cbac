// Inside comm: which way a call goes, by its kind and size. One table for both: the ways on one host, and those between
// hosts; an algorithm's name says where it belongs.
//
// On one host
//   slot      data travels in the slots by which ranks tell each other what they do: one exchange. At most 16 KiB
//   read      ranks read each other's data where it lies
//   in_place  of reductions: each rank combines its slice of everybody's data and stores the result to everybody, in
//   the
//             tensors themselves. Where peers cannot write there: slot, or staged piece by piece
//
// Between hosts, of reductions
//   leaders   each host's values meet at its leader, leaders send each other all they have: one exchange
//   shards    each rail reduces its part of the data, cut among the hosts: least data between hosts. Only where sums
//             by host follow the tree of all sums (net/net_layout.h); direct otherwise
//   direct    each rank reduces its slice of everybody's data
//
// Ranks of one host tell each other which way they go and may differ; between hosts all must go the same way.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "chorale/comm/call.h"

namespace chorale::comm {

enum class Algorithm : uint8_t { kNone, kSlot, kRead, kInPlace, kLeaders, kShards, kDirect };
std::string_view name_of(Algorithm algorithm);

class AlgorithmTable {
 public:
  struct Row {
    CallKind kind;
    uint64_t from_bytes;  // to the next row of the same kind and place
    Algorithm algorithm;
  };

  // The table that is built in, with the rows of CHORALE_ALGORITHMS in place of it for the calls and places that it
  // names: "all_reduce:0=leaders,all_reduce:65536=direct". Throws InvalidArgument that shows what is wrong.
  static AlgorithmTable from_environment();
  static AlgorithmTable parse(std::string_view rows);

  // The algorithm between hosts; kNone for a kind of which there is one way only.
  Algorithm between_hosts(CallKind kind, uint64_t bytes) const;
  // On one host a call goes by slots up to this many bytes, which may be more than fit there.
  uint64_t most_by_slot(CallKind kind) const;
  // The table in the form that parse() takes.
  std::string text() const;
  // The table for people, a line per kind of call: "all_reduce  on one host slot, from 1025 bytes in_place; between
  // hosts …".
  std::vector<std::string> lines() const;

 private:
  std::vector<Row> rows_;  // by kind, then by place, then by size
};

}  // namespace chorale::comm
