#include "chorale/launch/nodes.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <sstream>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/transport/host_identity.h"
#include "chorale/transport/socket.h"
#include "chorale/transport/store/prefix_store.h"

namespace chorale::launch {
namespace {

using namespace std::chrono_literals;

// How often a node shows that it lives, and looks at the others.
constexpr auto kBeat = 200ms;

uint16_t free_port(const std::string& address) {
  return transport::endpoint_of(transport::listen_at(transport::Endpoint::tcp(address, 0))).port;
}

}  // namespace

Nodes::Nodes(Self self, std::shared_ptr<transport::Store> store, int start)
    : self_(std::move(self)),
      prefix_(concat("nodes ", start)),
      store_(std::make_shared<transport::PrefixStore>(prefix_, std::move(store))),
      hosts_(static_cast<size_t>(self_.count), transport::host_name()),
      wake_up_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

Nodes::~Nodes() {
  ending_ = true;
  if (thread_.joinable()) thread_.join();
}

NodePlan Nodes::join(Deadline deadline) {
  if (self_.count == 1) return {0, self_.ranks_here, "127.0.0.1", free_port("127.0.0.1"), self_.run_id};
  if (self_.rank == 0) {
    store_->set("master", concat(self_.address, " ", free_port(self_.address), " ", self_.run_id), deadline);
  }
  // The text names the process and the time: a second launcher on the same host is another one.
  const std::string mine =
      concat(self_.ranks_here, " ", self_.count, " ", self_.max_restarts, " ", transport::host_name(), " process ",
             getpid(), " ", Deadline::Clock::now().time_since_epoch().count());
  const std::string known = store_->compare_set(key("node", self_.rank), "", mine, deadline);
  if (known != mine) {
    std::istringstream words(known);
    std::string skipped, host, pid;
    words >> skipped >> skipped >> skipped >> host >> skipped >> pid;
    throw InvalidArgument(concat("[launch] --node-rank ", self_.rank, " is taken by process ", pid, " on ", host,
                                 ", whose job goes on; each node needs a number of its own"));
  }
  if (self_.will) will_ = self_.will(concat(prefix_, "/", key("gone", self_.rank)));
  NodePlan plan;
  for (int node = 0; node < self_.count; ++node) {
    std::istringstream words(await_node(node, deadline));
    int ranks = 0, count = 0, max_restarts = 0;
    words >> ranks >> count >> max_restarts >> hosts_[static_cast<size_t>(node)];
    CHORALE_CHECK(count == self_.count && max_restarts == self_.max_restarts, "[launch] node ", node, " (",
                  hosts_[static_cast<size_t>(node)], ") was started with --nnodes ", count, " --max-restarts ",
                  max_restarts, ", this one with --nnodes ", self_.count, " --max-restarts ", self_.max_restarts);
    if (node < self_.rank) plan.first_rank += ranks;
    plan.world_size += ranks;
  }
  std::istringstream(store_->get("master", deadline)) >> plan.master_addr >> plan.master_port >> plan.run_id;
  return plan;
}

// What the node has said of itself.
std::string Nodes::await_node(int node, Deadline deadline) {
  const auto start = Deadline::Clock::now();
  for (Deadline::Clock::duration next_word = 4s;; next_word *= 4) {
    try {
      return store_->get(key("node", node), deadline.earlier(Deadline(start + next_word)));
    } catch (const transport::StoreLost&) {
      throw;
    } catch (const CommError&) {
      if (deadline.passed()) throw;
    }
    if (!self_.say) continue;
    const auto seconds = [](Deadline::Clock::duration time) {
      return std::chrono::duration_cast<std::chrono::seconds>(time).count();
    };
    self_.say(concat("node ", self_.rank, " waits at ", self_.where, " for node ", node, " of ", self_.count, " since ",
                     seconds(Deadline::Clock::now() - start), " s; gives up in ", seconds(deadline.left()), " s"));
  }
}

void Nodes::start_watching() {
  if (self_.count > 1) thread_ = std::thread([this] { watch(); });
}

void Nodes::halt(const Halt& why) {
  if (!thread_.joinable()) return set_halted(why);
  try {
    // The call may not take long: ranks and signals are waiting.
    store_->compare_set("halt", "", concat(why.may_restart, " ", why.exit_status, " ", why.reason), within(1s));
  } catch (const Error&) {  // then the others notice that we are silent
    set_halted(why);
  }
}

void Nodes::finish() {
  finished_ = true;
  if (!thread_.joinable()) {
    all_finished_ = true;
    eventfd_write(wake_up_.get(), 1);
  }
}

std::optional<Halt> Nodes::halted() const {
  const std::lock_guard lock(mutex_);
  return halted_;
}

void Nodes::set_halted(const Halt& why) {
  {
    const std::lock_guard lock(mutex_);
    if (!halted_) halted_ = why;
  }
  eventfd_write(wake_up_.get(), 1);
}

void Nodes::watch() {
  // What each node last showed, and since when.
  std::vector<std::pair<int64_t, Deadline::Clock::time_point>> beats(hosts_.size(), {-1, Deadline::Clock::now()});
  while (!ending_ && !halted() && !all_finished_) {
    try {
      look(beats);
    } catch (const Error& problem) {
      set_halted({concat("lost node 0 (", hosts_[0], "): ", problem.what()), 1, false});
    }
    std::this_thread::sleep_for(kBeat);
  }
}

void Nodes::look(std::vector<std::pair<int64_t, Deadline::Clock::time_point>>& beats) {
  // TCP may need as long again as the longest outage that is survived, and a little more.
  const auto silence = self_.keep_alive * 5 / 4;
  const Deadline deadline = within(silence);
  store_->add(key("beat", self_.rank), 1, deadline);
  if (finished_) store_->set(key("finished", self_.rank), "", deadline);
  if (store_->contains("halt", deadline)) {
    Halt why;
    std::istringstream words(store_->get("halt", deadline));
    words >> why.may_restart >> why.exit_status;
    std::getline(words >> std::ws, why.reason);
    return set_halted(why);
  }
  int finished = 0;
  const auto now = Deadline::Clock::now();
  for (int node = 0; node < self_.count; ++node) {
    if (store_->contains(key("finished", node), deadline)) {
      ++finished;
      continue;
    }
    if (store_->contains(key("gone", node), deadline)) {
      halt(
          {concat("lost node ", node, " (", hosts_[static_cast<size_t>(node)], "): its launcher has ended"), 1, false});
      continue;
    }
    auto& [beat, since] = beats[static_cast<size_t>(node)];
    const int64_t latest = store_->add(key("beat", node), 0, deadline);
    if (latest != beat) {
      beat = latest;
      since = now;
    } else if (now - since > silence) {
      halt({concat("node ", node, " (", hosts_[static_cast<size_t>(node)], ") was silent for ",
                   std::chrono::duration<double>(silence).count(), " s"),
            1, false});
    }
  }
  if (finished == self_.count) {
    all_finished_ = true;
    eventfd_write(wake_up_.get(), 1);
  }
}

}  // namespace chorale::launch
