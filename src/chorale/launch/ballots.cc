#include "chorale/launch/ballots.h"

#include <algorithm>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "chorale/base/error.h"

namespace chorale::launch {
namespace {

constexpr const char* kVoteKey = "vote";
constexpr int64_t kNodes = 1 << 16;

struct Vote {
  int64_t number = 0;    // of the decision
  int64_t promised = 0;  // ballots; 0: none
  int64_t given = 0;
  std::string value{};

  std::string text() const { return concat(number, " ", promised, " ", given, "\n", value); }
  static Vote parse(const std::string& text) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::istringstream words(text.substr(0, end));
    Vote vote;
    words >> vote.number >> vote.promised >> vote.given;
    if (!words || end == text.size())
      throw CommError(concat("[launch] a node has a vote that is not ours: '", text, "'"));
    vote.value = text.substr(end + 1);
    return vote;
  }
};

int64_t ballot_after(int64_t after, int node) { return (after / kNodes + 1) * kNodes + node; }

}  // namespace

void prepare_to_vote(transport::Store& own, Deadline deadline) {
  own.compare_set(kVoteKey, "", Vote().text(), deadline);
}

Ballot::Ballot(int64_t number, int node, std::vector<Voter> voters, int casting, int64_t after)
    : number_(number),
      voters_(std::move(voters)),
      casting_(casting),
      ballot_(ballot_after(after, node)),
      highest_(ballot_) {
  CHORALE_INVARIANT(node >= 0 && node < kNodes && !voters_.empty(), "node ", node, " cannot vote");
}

bool Ballot::is_enough(const std::vector<int>& nodes) const {
  const size_t twice = 2 * nodes.size();
  return twice > voters_.size() ||
         (twice == voters_.size() && std::find(nodes.begin(), nodes.end(), casting_) != nodes.end());
}

// The voters for whom `call` returned true. All are called at the same time, since calls to nodes that are gone take
// long.
std::vector<int> Ballot::collect(const std::function<bool(const Voter&)>& call) const {
  std::mutex mutex;
  std::vector<int> nodes;
  std::vector<std::thread> calls;
  calls.reserve(voters_.size());
  for (const Voter& voter : voters_) {
    if (!voter.store) continue;
    calls.emplace_back([&] {
      try {
        if (!call(voter)) return;
        const std::lock_guard lock(mutex);
        nodes.push_back(voter.node);
      } catch (const Error&) {  // it is not reached, or its answer was lost
      }
    });
  }
  for (std::thread& one : calls) one.join();
  std::sort(nodes.begin(), nodes.end());
  return nodes;
}

bool Ballot::ask(const std::function<void(const Voter&)>& also) {
  std::mutex mutex;
  Vote best;
  promised_ = collect([&](const Voter& voter) {
    const Deadline deadline = within(voter.patience);
    while (true) {
      const std::string before = voter.store->get(kVoteKey, deadline);
      Vote vote = Vote::parse(before);
      if (vote.number < number_) vote = {number_, 0, 0, {}};
      {
        const std::lock_guard lock(mutex);
        past_ = past_ || vote.number > number_;
        if (vote.number == number_) highest_ = std::max(highest_, vote.promised);
        if (std::find(reached_.begin(), reached_.end(), voter.node) == reached_.end()) reached_.push_back(voter.node);
      }
      if (vote.number > number_ || vote.promised >= ballot_) return false;
      vote.promised = ballot_;
      const std::string after = vote.text();
      if (voter.store->compare_set(kVoteKey, before, after, deadline) != after) continue;
      if (also) also(voter);
      const std::lock_guard lock(mutex);
      if (vote.given > best.given) best = vote;
      return true;
    }
  });
  bound_to_.reset();
  if (best.given > 0) bound_to_ = best.value;
  return is_enough(promised_);
}

bool Ballot::propose(const std::string& value) {
  CHORALE_INVARIANT(is_enough(promised_) && (!bound_to_ || *bound_to_ == value), "this ballot may not propose that");
  std::mutex mutex;
  return is_enough(collect([&](const Voter& voter) {
    const Deadline deadline = within(voter.patience);
    const std::string after = Vote{number_, ballot_, ballot_, value}.text();
    while (true) {
      const std::string before = voter.store->get(kVoteKey, deadline);
      const Vote vote = Vote::parse(before);
      {
        const std::lock_guard lock(mutex);
        past_ = past_ || vote.number > number_;
        if (vote.number == number_) highest_ = std::max(highest_, vote.promised);
      }
      if (vote.number > number_ || (vote.number == number_ && vote.promised > ballot_)) return false;
      if (before == after || voter.store->compare_set(kVoteKey, before, after, deadline) == after) return true;
    }
  }));
}

}  // namespace chorale::launch
