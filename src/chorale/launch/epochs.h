// Which processes are in a job that goes on when some of them die (`chorale run --elastic`): what the launcher of a
// node knows of its own. On one node it decides alone, on several with the others (launch/council.h;
// docs/dev/elastic.md).
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "chorale/launch/council.h"
#include "chorale/launch/successor.h"

namespace chorale::launch {

// Used by one thread.
class Epochs {
 public:
  struct Plan {
    ElasticLimits limits;
    int ranks = 1;                            // of this node at the start, and wanted until somebody resizes the job
    std::shared_ptr<transport::Store> store;  // the entries of this start
    std::shared_ptr<transport::EpochBoard> board;
    std::function<void(const std::string& line)> say = {};
    std::chrono::milliseconds patience = std::chrono::seconds(60);     // with fewer than the least
    std::chrono::milliseconds time_to_end = std::chrono::seconds(10);  // for a rank that was told to leave
    // Takes care of a job on several nodes; null on one.
    std::shared_ptr<Council> council = {};
    transport::EpochNode node{};  // this one
    transport::Epoch first{};     // the epoch to begin with
    int first_member = 0;         // of this node, of those in that epoch
    int newcomers_from = 0;       // numbers that no other node gives to its newcomers
  };
  // States the first epoch: members 0 to ranks - 1, each in the slot of its number, or those of the plan. A node that
  // is not in it has vacancies only.
  explicit Epochs(Plan plan);

  // A process has ended. `how` is nothing where it ended well.
  void ended(int member, const std::optional<std::string>& how);
  // A process was started in a slot that was vacant; returns its number, which no other had.
  int started(int slot);
  // From now on so many ranks are wanted: others are started, or the last ones leave at the next boundary of steps.
  // What is done about it, or why nothing is.
  std::string resize(int ranks);
  // This node is wanted back: its ranks leave at the next boundary, and then the node. False where the job cannot go on
  // without them.
  bool give_back();
  bool is_given_back() const { return given_back_; }
  // The job is being stopped: ranks do not wait for another epoch.
  void stop() { plan_.board->stop(); }
  // Slots in which a process is to be started.
  std::vector<int> vacancies();
  // Looks for processes that are ready, and states the next epoch when there is a change. Returns why the job cannot go
  // on.
  std::optional<std::string> look();

  // Whether look() must be called again soon: a newcomer is on its way, or other nodes may decide something.
  bool is_restless() const { return plan_.council || !absent_.empty(); }
  // Null unless the job is on several nodes, where the end of this node's ranks is not the job's.
  Council* council() const { return plan_.council.get(); }
  bool joins() const { return plan_.council && !plan_.first.has_node(plan_.node.number); }
  // No rank runs here, and none is to be started.
  bool is_finished();
  // Those that are not needed any more, and do not end by themselves: replacements, since all steps are done or since
  // the job was made smaller, and ranks that were told to leave. They are to be killed.
  std::vector<int> superfluous();
  // Whether its failure is one of the job, once all steps are done.
  bool has_taken_part(int member) {
    find_joined();
    return !absent_.contains(member) && !is_leaving(member);
  }
  // It was told to leave.
  bool is_leaving(int member) const { return leaving_.contains(member); }
  // All steps are done: from now on an end is an end.
  bool is_done();
  bool was_used();  // a process of the job has asked to take part: the program is one that can go on
  const transport::Epoch& current() const { return current_; }

 private:
  void find_joined();
  bool may_replace();
  int others_now() const;
  NodeFacts facts();
  int wanted_slots() const { return static_cast<int>(running_.size() - leaving_.size() + vacant_.size()); }
  void look_who_has_left();
  void state(const transport::Epoch& epoch);

  const Plan plan_;
  Successor successor_;
  transport::Epoch current_;
  std::map<int, int> running_;  // member → slot
  std::set<int> newcomers_;     // run, and are in no epoch yet
  std::set<int> absent_;        // replacements that do not have the state yet, these among them
  std::set<int> vacant_;        // slots
  // Told to leave; since when the ranks of an epoch without them have been meeting. The step before may be a long one.
  std::map<int, std::optional<std::chrono::steady_clock::time_point>> leaving_;
  std::vector<std::string> causes_;  // of the next epoch, so far
  int wanted_;                       // ranks of this node
  int next_member_;
  int failed_newcomers_ = 0;  // in a row
  bool used_ = false, done_ = false, somebody_left_ = false, given_back_ = false;
};

}  // namespace chorale::launch
