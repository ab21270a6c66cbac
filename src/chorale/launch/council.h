// The launchers of several nodes of an elastic job, as one of them sees them: who is there, and what they decide about
// the next epoch (docs/dev/elastic.md).
//
// Each launcher has a store of its own, which others reach. In it are its vote (launch/ballots.h), what it says of its
// ranks, and the last epoch that it knows. The lowest node of an epoch is its keeper: ranks meet in its store, the
// other nodes show there that they live and tell it of changes, and it proposes the next epoch. When the keeper is
// lost, any other node proposes one. A node that cannot get enough votes ends.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "chorale/launch/ballots.h"
#include "chorale/launch/successor.h"

namespace chorale::launch {

// Entries of a launcher's store that a node reads before it joins: the last epoch that the launcher knows, and the
// highest number that was given to a node, which the keeper has.
inline constexpr const char* kEpochOfNode = "epoch";
inline constexpr const char* kHighestNode = "nodes";

class Council {
 public:
  struct Plan {
    int node = 0;
    transport::Epoch epoch;                 // the first, or for a node that joins the last that it has heard of
    std::shared_ptr<transport::Store> own;  // of this node
    // The store at a place. Throws CommError.
    std::function<std::shared_ptr<transport::Store>(const std::string& place, Deadline deadline)> connect;
    // Lets the store at a place set a key when this node's launcher ends, however it does. Null: it cannot.
    std::function<std::shared_ptr<void>(const std::string& place, const std::string& key)> will = {};
    std::chrono::milliseconds keep_alive = std::chrono::seconds(10);
    Successor::Plan successor;
  };
  explicit Council(Plan plan);
  // Tells the others how it ended here, if it can.
  ~Council();
  Council(const Council&) = delete;
  Council& operator=(const Council&) = delete;

  // What this node says of its ranks, from now on.
  void tell(NodeFacts facts);
  // An epoch that was decided since the last call. This node is in it.
  std::optional<transport::Epoch> news();
  // Why this node has to end: it was excluded, it cannot reach enough of the others, or the job cannot go on.
  std::optional<std::string> problem() const;
  // All nodes end for this reason, an exit status and a line; the first one counts.
  void halt(const std::string& why);
  std::optional<std::string> halted() const;
  // More ranks are awaited, as far as this node knows.
  bool waits() const { return waits_; }
  bool is_done() const { return done_; }
  // There is nothing left to do here: the job has come to its end, or goes on without this node, which has left.
  bool all_finished() const { return all_finished_ || released_; }

 private:
  // What the keeper says to all.
  struct State;
  using Time = Deadline::Clock::time_point;

  void run();
  void await_bell();
  void ring(transport::Store& store, Deadline deadline) const;
  void learn();
  bool adopt(const transport::Epoch& epoch);
  bool is_keeper() const { return current_.nodes.front().number == plan_.node; }
  void keep();
  void follow();
  void take_over(const std::string& why);
  bool is_lost(int node, Time now);
  void add_newcomers(std::vector<NodeFacts>& nodes);
  std::optional<transport::Epoch> next_after(const std::vector<NodeFacts>& nodes);
  bool elect(const std::vector<int>& lost);
  void number_nodes() const;
  void end_if_in_vain(const std::string& why);
  void tell_of(const transport::Epoch& epoch);
  void fail(const std::string& why);
  std::shared_ptr<transport::Store> store_of(const transport::EpochNode& node, Deadline deadline);
  NodeFacts own_facts() const;
  std::string name_of(int node) const;

  const Plan plan_;
  const std::chrono::milliseconds silence_;  // after which a node is lost
  Successor successor_;
  transport::Epoch current_;
  std::map<int, std::shared_ptr<transport::Store>> stores_;  // by node; those that were reached
  int64_t heard_ = 0;                                        // bells
  int64_t after_ = 0;                                        // ballots

  // What the keeper knows: what each node last showed, since when, and what it has told.
  struct Beat {
    int64_t count = -1;
    Time since;
  };
  std::map<int, Beat> beats_;
  // What the other nodes know: when the keeper last answered, what it was told, and since when it is lost.
  Time contact_;
  std::string told_;
  std::shared_ptr<void> will_;
  std::optional<Time> keeper_lost_;
  std::optional<Time> in_vain_since_;  // too few nodes are reached

  std::atomic<bool> waits_ = false, done_ = false, all_finished_ = false, released_ = false, ending_ = false;
  mutable std::mutex mutex_;
  NodeFacts facts_;
  std::optional<transport::Epoch> news_;
  std::optional<std::string> problem_, halted_;
  std::thread thread_;
};

}  // namespace chorale::launch
