// Several launchers, one for each node, that act as one.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "chorale/launch/descriptor.h"
#include "chorale/transport/store/store.h"

namespace chorale::launch {

// What all nodes agree on before the ranks of a start begin.
struct NodePlan {
  int first_rank = 0;  // of this node
  int world_size = 0;
  std::string master_addr;  // for programs that let rank 0 host something, as torchrun's users do
  uint16_t master_port = 0;
  std::string run_id;  // of the job
};

// Why a start of the job ended before its ranks did.
struct Halt {
  std::string reason;
  int exit_status = 1;
  bool may_restart = true;
};

// One start of the job, as the launchers of all nodes see it. With one node everything is local. Between
// start_watching() and the destructor a thread shows the others that this node lives and looks whether they do: the
// first node that halts stops all, and so does one whose connection to node 0 is closed, or that was silent for longer
// than the keep-alive.
class Nodes {
 public:  // Without start_watching() the halt and the end of this node are its own alone.
  struct Self {
    int count = 1;
    int rank = 0;
    int ranks_here = 1;
    int max_restarts = 0;
    std::string address;  // of node 0, for master_addr
    std::string run_id;   // of node 0
    std::string where;    // the nodes meet, for messages
    std::chrono::milliseconds keep_alive = std::chrono::seconds(10);
    // Lets the store set this key when this node's launcher ends, however it does; null: the store cannot.
    std::function<std::shared_ptr<void>(const std::string& key)> will = {};
    // Takes a line for the user; null: nobody is interested.
    std::function<void(const std::string& line)> say = {};
  };
  Nodes(Self self, std::shared_ptr<transport::Store> store, int start);
  ~Nodes();
  Nodes(const Nodes&) = delete;
  Nodes& operator=(const Nodes&) = delete;

  // Waits for all nodes, and says after a few seconds for which. InvalidArgument when one with this number is there.
  NodePlan join(Deadline deadline);
  void start_watching();
  // The first one counts.
  void halt(const Halt& why);
  // The ranks of this node have all ended well.
  void finish();

  // Readable when one of the two below may have changed.
  int wake_up() const { return wake_up_.get(); }
  std::optional<Halt> halted() const;
  bool all_finished() const { return all_finished_; }

 private:
  void watch();
  void look(std::vector<std::pair<int64_t, Deadline::Clock::time_point>>& beats);
  void set_halted(const Halt& why);
  std::string await_node(int node, Deadline deadline);
  std::string key(const std::string& name, int node) const { return name + "/" + std::to_string(node); }

  const Self self_;
  const std::string prefix_;
  const std::shared_ptr<transport::Store> store_;
  std::shared_ptr<void> will_;
  std::vector<std::string> hosts_;
  Descriptor wake_up_;
  std::atomic<bool> finished_ = false, all_finished_ = false, ending_ = false;
  mutable std::mutex mutex_;
  std::optional<Halt> halted_;
  std::thread thread_;
};

}  // namespace chorale::launch
