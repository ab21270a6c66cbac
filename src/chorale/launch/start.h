// What the launcher of a node does from the start of its ranks to their end.
#pragma once

#include <unistd.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chorale/launch/control.h"
#include "chorale/launch/epochs.h"
#include "chorale/launch/launcher.h"
#include "chorale/launch/nodes.h"
#include "chorale/launch/output.h"
#include "chorale/launch/ranks.h"
#include "chorale/launch/signals.h"
#include "chorale/transport/keep_alive.h"

namespace chorale::launch {

// Standard output and standard error.
struct Outputs {
  Output output{STDOUT_FILENO}, errors{STDERR_FILENO};

  void say(const std::string& text) { errors.write(concat("chorale run: ", text, "\n")); }
  bool are_drained() const { return output.is_drained() && errors.is_drained(); }
  bool have_lost_a_reader() const { return output.has_lost_its_reader() || errors.has_lost_its_reader(); }
};

// One start of the ranks of this node.
class Start {
 public:
  // `epochs`: of an elastic job; null for others.
  Start(const LaunchOptions& options, const Signals& signals, Outputs& outputs, Ranks& ranks, Nodes& nodes,
        Epochs* epochs);

  // Nothing when every rank of every node ended well.
  std::optional<Halt> run();

  // Whether a signal ended it, or the want of a reader.
  bool was_interrupted() const { return interrupted_ != 0; }
  // The rank of this node that failed first.
  const std::optional<RankEnd>& culprit() const { return culprit_; }
  std::string others() const;

 private:
  void start_some();
  // Null unless the job is on several nodes.
  Council* council() const { return epochs_ ? epochs_->council() : nullptr; }
  // What ends the job on one node ends it on all.
  void hear_of_halts();
  void look_at(std::vector<RankEnd> ends);
  static std::string describe_end(const RankEnd& end);
  // Whether the end of a rank is for the epochs to deal with.
  bool goes_on_after(const RankEnd& end);
  void keep_going();
  std::string reply_to(const std::string& request);
  bool is_final(int status) const;
  void interrupt(int number);
  void stop(int number);
  void kill_all(std::string how);
  bool is_over();

  const LaunchOptions& options_;
  const Signals& signals_;
  Outputs& outputs_;
  Ranks& ranks_;
  Nodes& nodes_;
  Epochs* const epochs_;
  const std::optional<Control> control_ = epochs_ ? std::optional<Control>(std::in_place) : std::nullopt;
  const std::chrono::milliseconds stop_patience_ = epochs_ ? transport::stop_patience() : std::chrono::milliseconds(0);
  std::optional<RankEnd> lost_;  // the first rank that died, where the job goes on
  std::optional<RankEnd> culprit_;
  int ended_well_ = 0, stopped_ = 0;
  int interrupted_ = 0, stopped_by_ = 0;
  std::string how_killed_;
  bool starting_ = true, stopping_ = false, killed_ = false, finished_ = false;
  Deadline::Clock::time_point kill_at_{}, look_for_stopped_at_{};
  std::optional<Deadline::Clock::time_point> drained_by_;
};

}  // namespace chorale::launch
