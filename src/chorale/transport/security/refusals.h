// Strangers that were not let in, in the log.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <utility>

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

}  // namespace chorale::transport
