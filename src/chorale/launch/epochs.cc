#include "chorale/launch/epochs.h"

#include <fmt/format.h>

#include <algorithm>

#include "chorale/base/error.h"

namespace chorale::launch {
namespace {

using namespace std::chrono_literals;

// Replacements in a row that end before they take part: whatever the cause, the next one would end alike.
constexpr int kMostFailedNewcomers = 3;
// For a rank that was told to leave, to end.
constexpr auto kTimeToEnd = 10s;

}  // namespace

Epochs::Epochs(Plan plan) : plan_(std::move(plan)), wanted_(plan_.ranks), next_member_(plan_.ranks) {
  std::vector<int> members;
  for (int member = 0; member < plan_.ranks; ++member) {
    running_[member] = member;
    members.push_back(member);
  }
  state(std::move(members), "start");
}

void Epochs::state(std::vector<int> members, std::string cause) {
  using namespace std::chrono;
  current_ = {current_.number + 1, std::move(members), std::move(cause),
              duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count()};
  plan_.store->set(transport::epoch_key(current_.number), current_.text(), within(10s));
  plan_.board->set_waiting(false);
  plan_.board->announce(current_.number);  // behind the entry: who sees the number finds it
  for (auto& [member, since] : leaving_) since = since.value_or(steady_clock::now());
}

bool Epochs::was_used() {
  for (auto member = running_.begin(); !used_ && member != running_.end(); ++member)
    used_ = plan_.store->contains(transport::ready_key(member->first), within(10s));
  return used_;
}

bool Epochs::is_done() {
  if (!done_) done_ = plan_.store->contains(transport::kElasticDone, within(10s));
  return done_;
}

void Epochs::ended(int member, const std::optional<std::string>& how) {
  const auto found = running_.find(member);
  CHORALE_INVARIANT(found != running_.end(), "member ", member, " ended twice");
  const int slot = found->second;
  was_used();  // while it still counts
  running_.erase(found);
  newcomers_.erase(member);
  if (leaving_.erase(member) > 0) {
    absent_.erase(member);
    return;
  }
  if (absent_.erase(member) > 0) {
    if (++failed_newcomers_ == kMostFailedNewcomers && plan_.say)
      plan_.say(
          concat("the last ", kMostFailedNewcomers, " replacements ended before they took part; no more are started"));
  }
  if (how) {
    if (wanted_slots() < wanted_) vacant_.insert(slot);
    const int rank = current_.rank_of(member);
    causes_.push_back(concat(rank < 0 ? "newcomer" : concat("rank ", rank), " (member ", member, ") ", *how));
  } else {
    somebody_left_ = true;
    causes_.push_back(concat("member ", member, " has left"));
  }
}

std::string Epochs::resize(int ranks) {
  if (ranks < plan_.limits.least || ranks > plan_.limits.most)
    return concat("refused: ", ranks, " ranks are not within ", plan_.limits.least, ":", plan_.limits.most);
  if (!was_used()) return "refused: the program does not use parallel::Elastic, or has not begun";
  if (somebody_left_ || is_done()) return "refused: the job is about to end";
  const int before = wanted_;
  wanted_ = ranks;
  failed_newcomers_ = 0;
  for (int slot = 0; wanted_slots() < wanted_; ++slot) {
    const bool taken =
        std::any_of(running_.begin(), running_.end(), [&](const auto& row) { return row.second == slot; });
    if (!taken) vacant_.insert(slot);
  }
  while (wanted_slots() > wanted_ && !vacant_.empty()) vacant_.erase(std::prev(vacant_.end()));
  // The youngest first: rank 0 has the run's folder.
  for (auto member = running_.rbegin(); member != running_.rend() && wanted_slots() > wanted_; ++member)
    leaving_.emplace(member->first, std::nullopt);
  causes_.push_back(concat("resized from ", before, " to ", wanted_, " ranks"));
  if (plan_.say) plan_.say(causes_.back());
  return causes_.back();
}

std::vector<int> Epochs::vacancies() {
  // Whoever leaves of its own will is not replaced, nor is anybody after that: the job comes to its end.
  if (vacant_.empty() || somebody_left_ || failed_newcomers_ >= kMostFailedNewcomers || !was_used() || is_done())
    return {};
  std::vector<int> slots(vacant_.begin(), vacant_.end());
  vacant_.clear();
  return slots;
}

int Epochs::started(int slot) {
  const int member = next_member_++;
  running_[member] = slot;
  newcomers_.insert(member);
  absent_.insert(member);
  return member;
}

std::vector<int> Epochs::superfluous() {
  std::vector<int> members;
  const auto now = std::chrono::steady_clock::now();
  for (const auto& [member, since] : leaving_) {
    if (newcomers_.contains(member) || (since && now - *since > kTimeToEnd)) members.push_back(member);
  }
  if (absent_.empty() || !is_done()) return members;
  find_joined();  // behind the look for the end: whoever was needed for it had joined before
  members.insert(members.end(), absent_.begin(), absent_.end());
  return members;
}

void Epochs::find_joined() {
  std::erase_if(absent_, [&](int member) {
    const bool joined = plan_.store->contains(transport::joined_key(member), within(10s));
    if (joined) failed_newcomers_ = 0;
    return joined;
  });
}

std::optional<std::string> Epochs::look() {
  find_joined();
  std::vector<int> next;
  for (const int member : current_.members) {
    if (running_.contains(member) && !leaving_.contains(member)) next.push_back(member);
  }
  const bool lost = next.size() < current_.members.size();
  const bool lost_all = next.empty();
  std::vector<int> ready;
  for (const int member : newcomers_) {
    if (!leaving_.contains(member) && plan_.store->contains(transport::ready_key(member), within(10s)))
      ready.push_back(member);
  }
  if (!lost && ready.empty()) return {};
  if (lost_all && !somebody_left_)
    return concat("no rank is left that had the state of the job; start it again from a checkpoint. ",
                  fmt::format("{}", fmt::join(causes_, "; ")));
  if (!was_used()) return {};  // its first processes may still be on their way, or it is one that cannot go on
  next.insert(next.end(), ready.begin(), ready.end());
  const auto now = std::chrono::steady_clock::now();
  if (!somebody_left_ && static_cast<int>(next.size()) < plan_.limits.least) {
    if (!waits_since_) {
      waits_since_ = now;
      plan_.board->set_waiting(true);
      if (plan_.say)
        plan_.say(fmt::format("{} ranks are left, at least {} are wanted: waiting up to {} s for more", next.size(),
                              plan_.limits.least, plan_.patience.count() / 1000));
    }
    if (failed_newcomers_ < kMostFailedNewcomers && now - *waits_since_ < plan_.patience) return {};
    return fmt::format("{} ranks are left, at least {} are wanted, and no more have come. {}", next.size(),
                       plan_.limits.least, fmt::join(causes_, "; "));
  }
  waits_since_.reset();
  if (next.empty()) return {};
  if (!ready.empty()) {
    std::string text = ready.size() == 1 ? "member" : "members";
    for (const int member : ready) {
      newcomers_.erase(member);
      text += concat(" ", member);
    }
    causes_.push_back(text + (ready.size() == 1 ? " joins" : " join"));
  }
  const std::string cause = fmt::format("{}", fmt::join(causes_, "; "));
  causes_.clear();
  state(std::move(next), cause);
  if (plan_.say && !somebody_left_)
    plan_.say(fmt::format("epoch {}, {} ranks: {}", current_.number, current_.members.size(), cause));
  return {};
}

}  // namespace chorale::launch
