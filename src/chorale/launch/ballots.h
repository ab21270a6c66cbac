// How the launchers of several nodes decide one thing after the other, such that no two of them ever go on with
// different decisions: who is in the next epoch of an elastic job (docs/dev/elastic.md).
//
// Note [Ballots]
// Each node has an entry in a store of its own, its vote: the number of the decision that it is about, the highest
// ballot that the node has promised to, and the ballot and the value that it has voted for. Only compare_set changes
// it, so a voter needs no code of its own, and a request whose answer was lost was carried out whole or not at all.
//
// A ballot belongs to one node, which uses it once. It asks the voters for promises, and learns what each has voted
// for. Enough of them must answer: more than half of the voters, or half of them with the one that counts twice. Then
// it proposes the value of the highest ballot among these, where there is one, and else a value of its own. A value is
// decided when enough have voted for it. Any two sets that are enough meet in a node, so what was decided is found.
//
// A vote about a later decision takes the place of an earlier one: whoever begins with number N + 1 knows that N was
// decided. A node that still asks about N is told that it is past, which counts as no answer.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "chorale/transport/store/store.h"

namespace chorale::launch {

// Writes the first vote of a node, about nothing, into its store. Before anybody asks it.
void prepare_to_vote(transport::Store& own, Deadline deadline);

struct Voter {
  int node = 0;
  transport::Store* store = nullptr;         // null: it was never reached
  std::chrono::milliseconds patience{1000};  // for its answer
};

class Ballot {
 public:
  // A ballot of `node` about decision `number`, with a number above `after`. `casting` is the node that counts twice.
  Ballot(int64_t number, int node, std::vector<Voter> voters, int casting, int64_t after);

  // Asks the voters for promises, and calls `also` for each of them meanwhile; where that throws a CommError, the voter
  // has not answered. False where too few have answered.
  bool ask(const std::function<void(const Voter&)>& also = {});
  // The voters that promised.
  const std::vector<int>& promised() const { return promised_; }
  // What has to be proposed, as somebody may have decided it.
  const std::optional<std::string>& bound_to() const { return bound_to_; }
  // Whether it is decided by this. False does not mean that it is not.
  bool propose(const std::string& value);

  // The voters that answered, if only that they had promised to another ballot.
  const std::vector<int>& reached() const { return reached_; }
  // A voter has come to a later decision, so this one was made; ask what it was.
  bool is_past() const { return past_; }
  // A ballot must be above it to be promised.
  int64_t highest() const { return highest_; }
  bool is_enough(const std::vector<int>& nodes) const;

 private:
  std::vector<int> collect(const std::function<bool(const Voter&)>& call) const;

  const int64_t number_;
  const std::vector<Voter> voters_;
  const int casting_;
  const int64_t ballot_;
  int64_t highest_;
  bool past_ = false;
  std::vector<int> promised_, reached_;
  std::optional<std::string> bound_to_;
};

}  // namespace chorale::launch
