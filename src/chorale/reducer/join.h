// Training when ranks have different numbers of batches: a rank that has run out of them takes part in the others'
// collectives with zeros until all have, and then everybody gets the state of a rank that was among the last.
//
//   parallel::join({&ddp}, {}, [&] {
//     for (const Batch& batch : batches) …;
//   });
#pragma once

#include <functional>
#include <vector>

#include "chorale/comm/group.h"

namespace chorale::reducer {

struct JoinOptions {
  bool enabled = true;
  // Sums are divided by the group's size; otherwise by the number of ranks that still had inputs.
  bool divide_by_initial_size = true;
  // As soon as one rank runs out of inputs, all stop, with a StateError.
  bool throw_when_one_ends = false;
};

class Join;

// What can take part.
class Joinable {
 public:
  virtual ~Joinable() = default;
  virtual const comm::Group& join_group() const = 0;
  // What this rank does, without inputs, while others do a step: the same collectives.
  virtual void shadow_step(Join& join) = 0;
  // All ranks have run out of inputs; `authority` (global rank) has the state that counts.
  virtual void after_join(int authority) = 0;

  // The scope that it is in, or null.
  Join* current_join() const { return join_; }

 protected:
  // A scope with this object in it has begun, or has ended.
  virtual void note_join(bool /*began*/) {}

 private:
  friend class Join;
  Join* join_ = nullptr;
};

// Runs `body`, this rank's steps, and then what is needed until all ranks have ended theirs. An exception from `body`
// goes through at once.
void join(const std::vector<Joinable*>& joinables, const JoinOptions& options, const std::function<void()>& body);

class Join {
 public:
  Join(std::vector<Joinable*> joinables, const JoinOptions& options);
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  const JoinOptions& options() const { return options_; }
  // Called at the start of a step by each joinable; only the first one's counts. Tells the others that this rank is
  // alive.
  void notify(const Joinable& joinable);
  // Whether others take part that may read what one of them computes: an optimizer the gradients.
  bool is_shared() const { return joinables_.size() > 1; }
  // How many ranks are in this step; waits for the answer.
  int live_ranks();
  // Called after the last step of this rank: returns when all have ended.
  void finish();

 private:
  const comm::Group& group() const { return joinables_[0]->join_group(); }

  const std::vector<Joinable*> joinables_;
  const JoinOptions options_;
  Tensor live_;  // one i32
  comm::Work live_work_;
};

}  // namespace chorale::reducer
