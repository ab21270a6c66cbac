#include "chorale/launch/epochs.h"

#include <fmt/format.h>

#include <algorithm>

#include "chorale/base/error.h"

namespace chorale::launch {
namespace {

using namespace std::chrono_literals;

// Replacements in a row that end before they take part: whatever the cause, the next one would end alike.
constexpr int kMostFailedNewcomers = 3;

}  // namespace

Epochs::Epochs(Plan plan)
    : plan_(std::move(plan)),
      successor_({plan_.limits, plan_.patience, plan_.say}),
      wanted_(plan_.ranks),
      next_member_(plan_.council ? plan_.newcomers_from : plan_.ranks) {
  transport::Epoch first = plan_.first;
  if (!plan_.council) {
    first.number = 1;
    first.cause = "start";
    first.founders = plan_.ranks;
    for (int member = 0; member < plan_.ranks; ++member) first.members.push_back(member);
  }
  used_ = joins();  // by those that are there
  for (int slot = 0; slot < plan_.ranks; ++slot) {
    if (joins()) {
      vacant_.insert(slot);
    } else {
      running_[plan_.first_member + slot] = slot;
    }
  }
  state(first);
  if (plan_.council) plan_.council->tell(facts());
}

// States the epoch for the ranks of this node.
void Epochs::state(const transport::Epoch& epoch) {
  using namespace std::chrono;
  current_ = epoch;
  current_.stated_ns = duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
  plan_.store->set(transport::epoch_key(current_.number), current_.text(), within(10s));
  plan_.board->set_waiting(false);
  plan_.board->announce(current_.number);  // behind the entry: who sees the number finds it
  for (const int member : current_.members) newcomers_.erase(member);
  causes_.clear();
}

bool Epochs::was_used() {
  for (auto member = running_.begin(); !used_ && member != running_.end(); ++member)
    used_ = plan_.store->contains(transport::ready_key(member->first), within(10s));
  return used_;
}

bool Epochs::is_done() {
  if (!done_)
    done_ = (plan_.council && plan_.council->is_done()) || plan_.store->contains(transport::kElasticDone, within(10s));
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

// Ranks of other nodes.
int Epochs::others_now() const {
  if (!plan_.council) return 0;
  return static_cast<int>(std::count_if(current_.members.begin(), current_.members.end(),
                                        [&](int member) { return !running_.contains(member); }));
}

// The ranks of other nodes stay as they are.
std::string Epochs::resize(int ranks) {
  if (ranks < plan_.limits.least || ranks > plan_.limits.most)
    return concat("refused: ", ranks, " ranks are not within ", plan_.limits.least, ":", plan_.limits.most);
  if (!was_used()) return "refused: the program does not use parallel::Elastic, or has not begun";
  if (somebody_left_ || is_done()) return "refused: the job is about to end";
  const int others = others_now();
  if (ranks < others) return concat("refused: other nodes have ", others, " ranks; ask a launcher there, too");
  const int before = wanted_ + others;
  if (ranks == before && failed_newcomers_ == 0) return concat("nothing to do: ", ranks, " ranks are wanted already");
  wanted_ = ranks - others;
  failed_newcomers_ = 0;
  for (int slot = 0; wanted_slots() < wanted_; ++slot) {
    const bool taken =
        std::any_of(running_.begin(), running_.end(), [&](const auto& row) { return row.second == slot; });
    if (!taken) vacant_.insert(slot);
  }
  while (wanted_slots() > wanted_ && !vacant_.empty()) vacant_.erase(std::prev(vacant_.end()));
  // The youngest ranks leave first, since rank 0 has the run's folder.
  for (auto member = running_.rbegin(); member != running_.rend() && wanted_slots() > wanted_; ++member)
    leaving_.emplace(member->first, std::nullopt);
  causes_.push_back(concat("resized from ", before, " to ", ranks, " ranks"));
  if (plan_.say) plan_.say(causes_.back());
  return causes_.back();
}

bool Epochs::give_back() {
  if (!plan_.council || others_now() < plan_.limits.least || !was_used() || somebody_left_ || is_done()) return false;
  given_back_ = true;
  wanted_ = 0;
  vacant_.clear();
  for (const auto& [member, slot] : running_) leaving_.emplace(member, std::nullopt);
  causes_.push_back(concat("node ", plan_.node.number, " is wanted back"));
  if (plan_.say) plan_.say(concat(causes_.back(), ": its ranks leave, and the others go on"));
  return true;
}

// A rank that leaves of its own will is not replaced, nor is any rank after that: the job comes to its end.
bool Epochs::may_replace() {
  return !somebody_left_ && failed_newcomers_ < kMostFailedNewcomers && was_used() && !is_done();
}

std::vector<int> Epochs::vacancies() {
  if (vacant_.empty() || !may_replace()) return {};
  std::vector<int> slots(vacant_.begin(), vacant_.end());
  vacant_.clear();
  return slots;
}

bool Epochs::is_finished() { return running_.empty() && (vacant_.empty() || !may_replace()); }

int Epochs::started(int slot) {
  const int member = next_member_++;
  running_[member] = slot;
  newcomers_.insert(member);
  absent_.insert(member);
  return member;
}

// The first rank's report is the first entry of an epoch. On several nodes it is in another store, and the epoch's
// statement has to do.
void Epochs::look_who_has_left() {
  for (auto& [member, since] : leaving_) {
    if (since || current_.members.empty() || current_.rank_of(member) >= 0) continue;
    if (plan_.council || plan_.store->contains(concat(transport::epoch_prefix(current_.number), "/",
                                                      transport::report_key(current_.members.front())),
                                               within(10s)))
      since = std::chrono::steady_clock::now();
  }
}

std::vector<int> Epochs::superfluous() {
  std::vector<int> members;
  look_who_has_left();
  const auto now = std::chrono::steady_clock::now();
  for (const auto& [member, since] : leaving_) {
    if (newcomers_.contains(member) || (since && now - *since >= plan_.time_to_end)) members.push_back(member);
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

NodeFacts Epochs::facts() {
  NodeFacts facts;
  facts.node = plan_.node;
  facts.used = was_used();
  facts.left = somebody_left_;
  facts.hopeless = failed_newcomers_ >= kMostFailedNewcomers;
  facts.done = is_done();
  facts.finished = is_finished();
  facts.leaves = given_back_ && facts.finished;
  facts.cause = fmt::format("{}", fmt::join(causes_, "; "));
  for (const auto& [member, slot] : running_) {
    if (leaving_.contains(member)) continue;
    if (!newcomers_.contains(member) || plan_.store->contains(transport::ready_key(member), within(10s)))
      facts.members.push_back(member);
  }
  return facts;
}

std::optional<std::string> Epochs::look() {
  find_joined();
  std::optional<transport::Epoch> next;
  if (plan_.council) {
    plan_.council->tell(facts());
    next = plan_.council->news();
    plan_.board->set_waiting(plan_.council->waits());
    if (!next) return plan_.council->problem();
  } else {
    const Successor::Answer answer = successor_.after(current_, {facts()});
    plan_.board->set_waiting(successor_.waits());
    if (!answer.next) return answer.problem;
    next = answer.next;
  }
  const bool is_told = plan_.say && !somebody_left_;
  state(*next);
  if (is_told)
    plan_.say(fmt::format("epoch {}, {} ranks{}: {}", current_.number, current_.members.size(),
                          current_.nodes.empty() ? "" : fmt::format(" on {} nodes", current_.nodes.size()),
                          current_.cause));
  return {};
}

}  // namespace chorale::launch
