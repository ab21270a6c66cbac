#include "chorale/transport/fabric/chaos.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <csignal>
#include <limits>
#include <optional>
#include <thread>

#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

using Kind = ChaosFault::Kind;
using What = ChaosFault::What;

constexpr const char* kNames[] = {"delay", "stall", "short", "corrupt", "reset", "stop", "kill"};
constexpr int kShortWrites = 16;  // so many writes, each of a few bytes

bool has_time(Kind kind) { return kind == Kind::kDelay || kind == Kind::kStall; }

std::optional<uint64_t> number_in(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Cuts off what is before the separator.
std::string_view cut(std::string_view& text, char separator) {
  const size_t at = std::min(text.find(separator), text.size());
  const std::string_view head = text.substr(0, at);
  text.remove_prefix(std::min(at + 1, text.size()));
  return head;
}

ChaosFault parse_fault(std::string_view text, int size) {
  const std::string whole(text);
  const auto check = [&](bool good, const char* expected) {
    CHORALE_CHECK(good, "[chaos] '", whole, "' is no fault: ", expected,
                  "; a fault is such as kill@rank=1,call=7 or delay@rank=0,call=3,ms=50 or "
                  "corrupt@rank=0,call=2,what=payload");
  };
  ChaosFault fault;
  const std::string_view name = cut(text, '@');
  const auto* const found = std::find(std::begin(kNames), std::end(kNames), name);
  check(found != std::end(kNames), "it begins with delay, stall, short, corrupt, reset, stop or kill");
  fault.kind = static_cast<Kind>(found - std::begin(kNames));
  bool has_rank = false, has_call = false;
  while (!text.empty()) {
    std::string_view value = cut(text, ',');
    const std::string_view key = cut(value, '=');
    const std::optional<uint64_t> number = number_in(value);
    if (key == "rank") {
      check(number && *number < static_cast<uint64_t>(size), "rank is one of the job's");
      fault.rank = static_cast<int>(*number);
      has_rank = true;
    } else if (key == "call") {
      check(number && *number >= 1, "calls are counted from 1");
      fault.call = *number;
      has_call = true;
    } else if (key == "ms" && has_time(fault.kind)) {
      check(number && *number <= 86'400'000, "ms is at most a day");
      fault.time = std::chrono::milliseconds(*number);
    } else if (key == "what" && fault.kind == Kind::kCorrupt) {
      check(value == "control" || value == "payload", "what is control or payload");
      fault.what = value == "payload" ? What::kPayload : What::kControl;
    } else {
      check(false, "it takes rank and call, ms with delay and stall, what with corrupt");
    }
  }
  check(has_rank && has_call, "rank and call are needed");
  return fault;
}

// Mostly what a job must survive; half of the plans have one fault that it cannot. Payloads are never damaged: without
// checksums that would be a wrong result.
ChaosPlan random_plan(uint64_t seed, int size) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t end) { return random() % end; };
  const auto make = [&](Kind kind) {
    ChaosFault fault;
    fault.kind = kind;
    fault.rank = static_cast<int>(below(static_cast<uint64_t>(size)));
    // The fault is as likely among the first ten calls as among the next hundreds.
    fault.call = 1 + below(below(2) == 0 ? 10 : 500);
    if (has_time(kind)) fault.time = std::chrono::milliseconds(1 + below(200));
    return fault;
  };
  ChaosPlan plan;
  for (uint64_t left = 2 + below(6); left > 0; --left) plan.push_back(make(static_cast<Kind>(below(3))));
  if (below(2) == 0) plan.push_back(make(static_cast<Kind>(3 + below(4))));
  return plan;
}

}  // namespace

ChaosPlan chaos_plan(std::string_view text, int size) {
  if (const auto seed = number_in(text)) return random_plan(*seed, size);
  ChaosPlan plan;
  while (!text.empty()) plan.push_back(parse_fault(cut(text, ';'), size));
  return plan;
}

std::string text_of(const ChaosPlan& plan) {
  std::string text;
  for (const ChaosFault& fault : plan) {
    if (!text.empty()) text += ';';
    text += concat(kNames[static_cast<size_t>(fault.kind)], "@rank=", fault.rank, ",call=", fault.call);
    if (has_time(fault.kind)) text += concat(",ms=", fault.time.count());
    if (fault.kind == Kind::kCorrupt) text += fault.what == What::kPayload ? ",what=payload" : ",what=control";
  }
  return text;
}

std::shared_ptr<Chaos> Chaos::of_rank(const ChaosPlan& plan, int rank) {
  ChaosPlan own;
  std::copy_if(plan.begin(), plan.end(), std::back_inserter(own),
               [&](const auto& fault) { return fault.rank == rank; });
  if (own.empty()) return nullptr;
  std::stable_sort(own.begin(), own.end(), [](const auto& a, const auto& b) { return a.call < b.call; });
  return std::make_shared<Chaos>(std::move(own), rank);
}

Chaos::Chaos(ChaosPlan faults, int rank) : planned_(std::move(faults)), random_(static_cast<uint64_t>(rank) + 1) {}

void Chaos::enter_call() {
  std::chrono::milliseconds delay{0};
  int signal = 0;
  {
    const std::lock_guard lock(mutex_);
    ++call_;
    while (!planned_.empty() && planned_.front().call == call_) {
      const ChaosFault fault = planned_.front();
      planned_.erase(planned_.begin());
      if (fault.kind == Kind::kDelay) {
        delay += fault.time;
      } else if (fault.kind == Kind::kStop || fault.kind == Kind::kKill) {
        signal = fault.kind == Kind::kStop ? SIGSTOP : SIGKILL;
      } else {
        armed_.push_back(fault);
        armed_count_.store(armed_.size());
      }
    }
  }
  if (delay.count() > 0) std::this_thread::sleep_for(delay);
  if (signal != 0) kill(getpid(), signal);
}

bool Chaos::take(Kind kind, What what, ChaosFault* fault) {
  const auto found =
      std::find_if(armed_.begin(), armed_.end(), [&](const auto& one) { return one.kind == kind && one.what == what; });
  if (found == armed_.end()) return false;
  if (fault) *fault = *found;
  armed_.erase(found);
  armed_count_.store(armed_.size());
  return true;
}

void Chaos::pause() {
  if (armed_count_.load() == 0) return;
  ChaosFault fault;
  {
    const std::lock_guard lock(mutex_);
    if (!take(Kind::kStall, What::kControl, &fault)) return;
  }
  std::this_thread::sleep_for(fault.time);
}

void Chaos::touch(What what, std::span<std::byte> bytes) {
  if (armed_count_.load() == 0 || bytes.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    if (!take(Kind::kCorrupt, what)) return;
  }
  flip(bytes);
}

Chaos::Write Chaos::before_write(size_t bytes, bool has_payload) {
  Write write{.most = bytes};
  pause();
  const std::lock_guard lock(mutex_);
  if (take(Kind::kShort, What::kControl)) short_writes_ += kShortWrites;
  if (short_writes_ > 0) {
    --short_writes_;
    write.most = std::min<size_t>(bytes, 1 + random_() % 7);
  }
  write.reset = take(Kind::kReset, What::kControl);
  write.corrupt_control = take(Kind::kCorrupt, What::kControl);
  write.corrupt_payload = has_payload && take(Kind::kCorrupt, What::kPayload);
  return write;
}

void Chaos::flip(std::span<std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  bytes[random_() % bytes.size()] ^= static_cast<std::byte>(1u << (random_() % 8));
}

}  // namespace chorale::transport
