#include "chorale/comm/leaving.h"

#include <algorithm>
#include <cstdlib>
#include <thread>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/comm/failure.h"
#include "chorale/comm/flight_file.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

constexpr Deadline::Clock::duration kFirstGlance = 20us, kLastGlance = 5ms;  // between looks at ranks that stay

}  // namespace

std::chrono::milliseconds leave_patience() {
  const auto text = config::env("CHORALE_LEAVE_PATIENCE");
  if (!text) return 5s;
  char* end = nullptr;
  const double seconds = std::strtod(text->c_str(), &end);
  CHORALE_CHECK(*end == 0 && seconds >= 0 && seconds < 1e9, "[group] CHORALE_LEAVE_PATIENCE is '", *text,
                "'; it takes a number of seconds, such as 5");
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

namespace {

[[noreturn]] void raise_at_the_end(const Engine& engine, int culprit, const std::string& how) {
  const Membership& membership = engine.membership();
  std::string text = concat("[group] ", who_is_this(membership), " leaves the group, but ", how);
  const std::string record = write_flight(membership.own_global(), engine.flight_record() + "\n");
  if (!record.empty()) text += concat(" [the last calls are in ", record, "]");
  throw CommError(text, {membership.own_global(), membership.global(culprit), "leave", engine.last_number()});
}

// Names the ranks that are still in the group; empty when all have left.
std::string look_at_others(const Engine& engine, Leaver& leaver) {
  const Membership& membership = engine.membership();
  std::string stay;
  for (int peer = 0; peer < membership.size(); ++peer) {
    if (peer == membership.rank) continue;
    switch (leaver.after_goodbye(peer)) {
      case Leaver::Does::kCalled:
        raise_at_the_end(engine, membership.rank,
                         concat(leaver.describe_peer(peer), ", a call that this rank did not make"));
      case Leaver::Does::kThrew:
        raise_at_the_end(engine, peer,
                         concat(leaver.describe_peer(peer), ", and left the group because of an exception"));
      case Leaver::Does::kStays:
        stay += concat(stay.empty() ? "" : "; ", leaver.describe_peer(peer));
        break;
      case Leaver::Does::kLeft:
        break;
    }
  }
  return stay;
}

}  // namespace

bool leave(Group& group, std::optional<std::chrono::milliseconds> patience) {
  if (!group.is_member()) return true;
  const std::shared_ptr<Engine> engine = group.engine();
  group.destroy();
  auto* leaver = dynamic_cast<Leaver*>(engine.get());
  if (!leaver || engine->context().made.is_foreign() || engine->membership().size() == 1) return true;
  const auto most = patience ? *patience : leave_patience();
  std::unique_lock lock(engine->context().mutex);
  leaver->finish_calls(lock);
  if (engine->is_broken()) return true;
  leaver->say_goodbye();
  const Deadline end = within(most);
  for (auto pause = kFirstGlance;; pause = std::min(pause * 2, kLastGlance)) {
    const std::string stay = look_at_others(*engine, *leaver);
    if (stay.empty()) return true;
    if (end.passed()) {
      log_warning(concat("[group] ", who_is_this(engine->membership()), " leaves, after ", in_seconds(most),
                         " (CHORALE_LEAVE_PATIENCE), before ", stay, "; a call that is made there now will fail"));
      return false;
    }
    lock.unlock();
    std::this_thread::sleep_for(pause);
    lock.lock();
  }
}

void abandon(const Group& group, const std::string& why) {
  if (!group.is_member()) return;
  RankContext& context = group.engine()->context();
  const std::lock_guard lock(context.mutex);
  for (Engine* engine : context.engines) engine->abandon(why);
}

}  // namespace chorale::comm
