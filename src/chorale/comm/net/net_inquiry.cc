#include "chorale/comm/net/net_inquiry.h"

#include <algorithm>

#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

// A rank that differs may be found before a third, whose call would show which of the two is wrong, has made its own.
constexpr auto kDifferencePatience = 1s;
// Threads of fabrics answer within this time, also where many share a core.
constexpr auto kAnswerPatience = 300ms;
constexpr auto kQuestionInterval = 50ms;

}  // namespace

NetInquiry::NetInquiry(NetGroup& group, uint32_t number, const Fingerprint& print)
    : group_(group), number_(number), print_(print), calls_(static_cast<size_t>(group.size())) {
  calls_[static_cast<size_t>(group.rank())] = print;
}

void NetInquiry::note(int peer, const Fingerprint& print) {
  calls_[static_cast<size_t>(peer)] = print;
  if (!(print == print_) && !differs_since_) differs_since_ = Clock::now();
}

void NetInquiry::learn(int peer) {
  if (calls_[static_cast<size_t>(peer)]) return;
  const NetGroup::Whereabouts where = group_.whereabouts(peer);
  if (where.number == number_) note(peer, where.print);
}

void NetInquiry::ask() {
  const auto now = Clock::now();
  if (now < next_question_) return;
  next_question_ = now + kQuestionInterval;
  group_.ask_where();
}

void NetInquiry::look_at_calls(std::span<const int> awaited) {
  for (int peer : group_.layout.neighbours()) learn(peer);
  for (int peer : awaited) learn(peer);
  if (!differs_since_) return;
  ask();
  bool all = true;
  std::vector<Fingerprint> calls;
  for (int peer = 0; peer < group_.size(); ++peer) {
    learn(peer);
    const auto& call = calls_[static_cast<size_t>(peer)];
    all = all && call;
    calls.push_back(call.value_or(Fingerprint{}));
  }
  if (!all && Clock::now() - *differs_since_ < kDifferencePatience) return;
  try {
    raise_difference(group_.membership, calls);
  } catch (CallFailed& failure) {
    failure.unsure = !all;
    throw;
  }
}

std::optional<int> NetInquiry::silent_one() {
  std::optional<int> silent;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank()) continue;
    if (group_.layout.is_here(peer)) {
      if (group_.is_stopped_here(peer)) return peer;
    } else if (!group_.has_answered(peer, *late_since_)) {
      if (!silent || (group_.is_silent(peer) && !group_.is_silent(*silent))) silent = peer;
    }
  }
  return silent;
}

std::optional<int> NetInquiry::late_one() const {
  for (int peer = 0; peer < group_.size() && number_ > 0; ++peer) {
    if (calls_[static_cast<size_t>(peer)]) continue;
    if (static_cast<int32_t>(group_.whereabouts(peer).number - number_) < 0) return peer;
  }
  return std::nullopt;
}

std::optional<int> NetInquiry::find_culprit(std::span<const int> awaited) {
  if (differs()) return std::nullopt;
  const auto now = Clock::now();
  if (!late_since_) late_since_ = now;
  ask();
  if (const auto silent = silent_one()) {
    const bool may_answer = !group_.layout.is_here(*silent) && now - *late_since_ < kAnswerPatience;
    return may_answer ? std::nullopt : silent;
  }
  if (const auto late = late_one()) return late;
  return awaited.empty() ? -1 : awaited.front();
}

}  // namespace chorale::comm
