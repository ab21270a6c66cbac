#include "chorale/comm/stop_watch.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/transport/keep_alive.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

// It costs a look into /proc for each rank.
constexpr auto kLongestPause = 1000ms;
// After so long without a look it is not known what was in between.
constexpr auto kBreak = 5s;

}  // namespace

StopWatch::StopWatch() : patience_(transport::stop_patience()) {}

void StopWatch::look(const Membership& membership, const Operation& operation, int only,
                     const std::function<bool(int)>& is_stopped, const std::function<std::string(int)>& who_is) {
  const auto now = Clock::now();
  const auto pause = std::min<Clock::duration>(patience_ / 4, kLongestPause);
  if (now < next_ || now - operation.issued < pause) return;
  if (now - last_ > kBreak) since_.clear();
  last_ = now;
  next_ = now + pause;
  for (int peer = 0; peer < membership.size(); ++peer) {
    if (peer == membership.rank || (only >= 0 && peer != only)) continue;
    if (!is_stopped(peer)) {
      since_.erase(peer);
      continue;
    }
    const auto since = since_.try_emplace(peer, now).first->second;
    if (now - since < patience_) continue;
    throw CallFailed{concat(who_is(peer), "; it is stopped since ", in_seconds(now - since),
                            ", and others wait no longer for that (CHORALE_STOP_PATIENCE)"),
                     membership.global(peer)};
  }
}

}  // namespace chorale::comm
