#include "chorale/comm/core_watch.h"

#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <string_view>

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

// Waits go to sleep soon for so long after a gap: one that tries out whether the core is free again may cost a turn of
// the other program, some milliseconds.
constexpr auto kBusyTime = 200ms;
// A core is wanted where a thread stood in line for more than one part in so many of its time.
constexpr int kShareInLine = 20;

}  // namespace

std::optional<CoreWatch::Delay> CoreWatch::delay_of_this_thread() {
  const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
  if (file < 0) return std::nullopt;
  char bytes[96];
  const ssize_t length = read(file, bytes, sizeof bytes);
  close(file);
  if (length <= 0) return std::nullopt;
  // "time on a core, time in line, turns"
  const std::string_view text(bytes, static_cast<size_t>(length));
  const size_t space = text.find(' ');
  if (space == std::string_view::npos) return std::nullopt;
  int64_t nanoseconds = 0;
  if (std::from_chars(text.data() + space + 1, text.data() + text.size(), nanoseconds).ec != std::errc())
    return std::nullopt;
  return Delay{gettid(), std::chrono::nanoseconds(nanoseconds)};
}

std::optional<std::chrono::nanoseconds> CoreWatch::in_line_since_last_time() {
  const auto before = delay_;
  delay_ = read_delay_();
  if (!before || !delay_ || before->thread != delay_->thread) return std::nullopt;
  return delay_->time - before->time;
}

bool CoreWatch::stood_in_line(Clock::time_point now) {
  const auto in_line = in_line_since_last_time();
  const auto since = now - read_at_;
  read_at_ = now;
  return in_line && *in_line >= kGap / 2 && *in_line * kShareInLine > since;
}

bool CoreWatch::note_gap(Clock::time_point now) {
  // Data may have been moved in the gap. Where the system does not tell, the gap alone counts.
  if (!stood_in_line(now) && delay_) return false;
  until_ = now + kBusyTime;
  return true;
}

bool CoreWatch::is_wanted_at(Clock::time_point now) {
  if (until_ == Clock::time_point{}) return false;
  if (now < until_) return true;
  const bool still = stood_in_line(now);
  until_ = still ? now + kBusyTime : Clock::time_point{};
  return still;
}

}  // namespace chorale::comm
