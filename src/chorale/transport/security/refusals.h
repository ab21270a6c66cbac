// Strangers that were not let in, in the log.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/base/log.h"

namespace chorale::transport {

// A stranger that tries again and again must not fill the disk: after the first hundred, each power of two is logged.
class Refusals {
 public:
  Refusals(std::string who, std::string where) : who_(std::move(who)), where_(std::move(where)) {}

  void add(const std::string& peer, const std::string& why) {
    constexpr uint64_t kLoggedEach = 100;
    if (++count_ > kLoggedEach && !std::has_single_bit(count_)) return;
    log_warning(concat("[", who_, "] refused ", peer, " at ", where_, ": ", why,
                       count_ > kLoggedEach ? concat(" (", count_, " refused so far)") : ""));
  }

 private:
  const std::string who_;
  const std::string where_;
  uint64_t count_ = 0;
};

// Which of these strangers (the oldest first; "ADDRESS:PORT") has to make room for another: the oldest of those that
// come from where most come from. So a stranger with many connections loses its own, not those of a rank.
inline size_t stranger_to_drop(const std::vector<std::string>& peers) {
  std::map<std::string, size_t> count;
  const auto address = [](const std::string& peer) { return peer.substr(0, peer.rfind(':')); };
  size_t most = 0;
  for (const std::string& peer : peers) most = std::max(most, ++count[address(peer)]);
  size_t index = 0;
  while (count[address(peers[index])] < most) ++index;
  return index;
}

}  // namespace chorale::transport
