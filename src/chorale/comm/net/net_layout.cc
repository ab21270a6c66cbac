#include "chorale/comm/net/net_layout.h"

#include <algorithm>

namespace chorale::comm {
namespace {

// How many of n leaves are in the left branch of the tree.
int left_of(int n) {
  int left = 1;
  while (2 * left < n) left *= 2;
  return left;
}

// Ranks [begin, end) are the members of hosts [first, last), and the two trees over them fit.
bool fits(const std::vector<std::vector<int>>& hosts, int begin, int end, int first, int last) {
  const std::vector<int>& one = hosts[static_cast<size_t>(first)];
  if (last - first == 1)
    return one.front() == begin && one.back() == end - 1 && static_cast<int>(one.size()) == end - begin;
  const int middle = begin + left_of(end - begin), host = first + left_of(last - first);
  return hosts[static_cast<size_t>(host)].front() == middle && fits(hosts, begin, middle, first, host) &&
         fits(hosts, middle, end, host, last);
}

}  // namespace

NetLayout::NetLayout(std::span<const uint64_t> host_of_rank, int own_rank) {
  std::vector<uint64_t> labels;
  for (size_t rank = 0; rank < host_of_rank.size(); ++rank) {
    const auto found = std::find(labels.begin(), labels.end(), host_of_rank[rank]);
    const auto at = static_cast<size_t>(found - labels.begin());
    if (found == labels.end()) {
      labels.push_back(host_of_rank[rank]);
      hosts.emplace_back();
    }
    host_of.push_back(static_cast<int>(at));
    index_of.push_back(static_cast<int>(hosts[at].size()));
    hosts[at].push_back(static_cast<int>(rank));
  }
  host = host_of[static_cast<size_t>(own_rank)];
  index = index_of[static_cast<size_t>(own_rank)];
  rails = static_cast<int>(hosts[0].size());
  for (const auto& members : hosts) rails = std::min(rails, static_cast<int>(members.size()));
  follows_tree = fits(hosts, 0, static_cast<int>(host_of_rank.size()), 0, host_count());
}

}  // namespace chorale::comm
