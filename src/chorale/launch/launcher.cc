#include "chorale/launch/launcher.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/launch/epochs.h"
#include "chorale/launch/gathering.h"
#include "chorale/launch/last_calls.h"
#include "chorale/launch/mps.h"
#include "chorale/launch/ranks.h"
#include "chorale/launch/room.h"
#include "chorale/launch/start.h"
#include "chorale/transport/fabric/chaos.h"
#include "chorale/transport/host_identity.h"
#include "chorale/transport/interface.h"
#include "chorale/transport/keep_alive.h"
#include "chorale/transport/security/secret.h"
#include "chorale/transport/store/memory_store.h"
#include "chorale/transport/store/prefix_store.h"
#include "chorale/transport/store/rendezvous.h"
#include "chorale/transport/store/store_server.h"
#include "chorale/transport/store/tcp_store.h"

namespace chorale::launch {
namespace {

using namespace std::chrono_literals;
using transport::Endpoint;
using transport::Secret;

constexpr int kNoProgram = 127;
constexpr auto kLeavingTime = 1500ms;

std::string summary_of(const Halt& halt, const Start& start, const Ranks& ranks,
                       std::chrono::system_clock::time_point began, int restarts, const LaunchOptions& options,
                       const FlightFolder& flights) {
  std::string text = halt.reason;
  if (const auto& culprit = start.culprit()) {
    const auto second = std::chrono::system_clock::to_time_t(culprit->when);
    text += fmt::format("\n  pid         {}", culprit->pid);
    text += fmt::format("\n  when        {:%Y-%m-%d %H:%M:%S}, {:.1f} s after the start", fmt::localtime(second),
                        std::chrono::duration<double>(culprit->when - began).count());
    const auto& lines = ranks.last_errors(culprit->rank);
    if (lines.empty()) text += "\n  last error  nothing on standard error";
    for (size_t i = 0; i < lines.size(); ++i)
      text += fmt::format("\n  {:<11} {}", i == 0 ? "last error" : "", lines[i]);
  }
  const auto calls = last_calls(flights.path(), ranks.rank_of_process());
  for (size_t i = 0; i < calls.size(); ++i) {
    text += fmt::format("\n  {:<11} rank {}: {}", i == 0 ? "last calls" : "", calls[i].rank, calls[i].text);
  }
  if (!calls.empty()) text += fmt::format("\n  records     {}{}", calls.front().file, calls.size() > 1 ? ", …" : "");
  text += fmt::format("\n  {:<11} {}", start.culprit() ? "others" : "ranks", start.others());
  if (options.max_restarts > 0) text += fmt::format("\n  restarts    {} of {}", restarts, options.max_restarts);
  return text;
}

class Launcher {
 public:
  Launcher(const LaunchOptions& options, std::string program) : options_(options), program_(std::move(program)) {
    CHORALE_CHECK(options.ranks >= 1 && options.nodes >= 1 && options.node_rank >= 0 &&
                      options.node_rank < options.nodes && options.max_restarts >= 0,
                  "[launch] ", options.ranks, " ranks on node ", options.node_rank, " of ", options.nodes, " with ",
                  options.max_restarts, " restarts cannot be");
    CHORALE_CHECK(!options.elastic || is_one_of_several() ||
                      (options.elastic->least <= options.ranks && options.ranks <= options.elastic->most),
                  "[launch] an elastic job has from the start as many ranks as it may have");
    auto secret = Secret::from_environment();
    if (secret) secret_ = *secret;
    secret_file_ = Descriptor(secret_.to_descriptor());
    if (!is_one_of_several()) {
      server_.emplace(Endpoint::tcp("127.0.0.1", 0), secret_);
      place_ = server_->endpoint();
      self_store_ = std::make_shared<transport::MemoryStore>();
      return;
    }
    CHORALE_CHECK(!options.rendezvous.empty() || !options.join.empty(),
                  "[launch] several nodes meet at node 0: --rdzv HOST:PORT");
    CHORALE_CHECK(secret,
                  "[launch] several nodes need a secret: set CHORALE_SECRET_FILE to a file with the same secret on "
                  "every node (openssl rand -hex 32 >secret; chmod 600 secret)");
    const std::string& named = options.join.empty() ? options.rendezvous : options.join;
    place_ = Endpoint::parse(named);
    CHORALE_CHECK(!place_.is_unix() && place_.port != 0, "[launch] ", options.join.empty() ? "--rdzv" : "--join",
                  " must be HOST:PORT, not ", named);
    if (options.elastic && (options.node_rank != 0 || !options.join.empty()))
      own_server_.emplace(Endpoint::tcp(transport::own_address(place_.host), 0), secret_);
    if (!options.join.empty()) {
      self_store_ = std::make_shared<transport::MemoryStore>();  // there is nobody to meet
      return;
    }
    if (options.node_rank == 0) server_.emplace(transport::listening_place(place_), secret_);
    self_store_ = signals_.let_through([&] {
      if (options.node_rank != 0)
        outputs_.say(concat("node ", options.node_rank, " looks for node 0 at ", place_.text()));
      return std::make_shared<transport::TcpStore>(server_ ? server_->endpoint() : place_, secret_, within(30min));
    });
  }

  ~Launcher() {
    self_store_.reset();
    if (!is_one_of_several()) return;
    // The other nodes still have to read how it ended; they look five times a second.
    for (const auto* server : {&server_, &own_server_}) {
      if (*server) signals_.let_through([&] { (*server)->wait_for_clients_to_leave(within(kLeavingTime)); });
    }
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  int run() {
    const int status = run_to_the_end();
    finish_output();
    return status == 0 && output_is_lost_ ? kOutputLost : status;
  }

 private:
  bool is_one_of_several() const { return options_.nodes > 1 || !options_.join.empty(); }
  // Where this launcher's own store is.
  Endpoint own_place() const { return (own_server_ ? own_server_ : server_)->endpoint(); }

  int run_to_the_end() {
    for (int restarts = 0;; ++restarts) {
      const std::optional<Halt> halt = run_once(restarts);
      if (!halt) return 0;
      if (!halt->may_restart || restarts == options_.max_restarts) return halt->exit_status;
      outputs_.say(fmt::format("starting again, restart {} of {}", restarts + 1, options_.max_restarts));
    }
  }

  // What was printed reaches its reader, however slow that is; a signal to stop ends that too.
  void finish_output() {
    for (const auto& [name, output] : {std::pair("output", &outputs_.output), std::pair("error", &outputs_.errors)}) {
      if (output->problem().empty()) continue;
      output_is_lost_ = true;
      outputs_.say(
          concat("cannot write to standard ", name, ": ", output->problem(), "; what the ranks printed is lost"));
    }
    const Deadline patience = interrupted_ ? within(500ms) : Deadline::never();
    while (!outputs_.are_drained() && !patience.passed()) {
      pollfd wanted[] = {{signals_.descriptor(), POLLIN, 0},
                         {outputs_.output.wake_up(), POLLIN, 0},
                         {outputs_.errors.wake_up(), POLLIN, 0}};
      poll(wanted, 3, 100);
      outputs_.output.woken();
      outputs_.errors.woken();
      const std::vector<int> signals = signals_.take();
      if (std::any_of(signals.begin(), signals.end(), [](int number) { return number != SIGCHLD; })) return;
    }
  }

  std::optional<Halt> run_once(int restarts) {
    const auto began = std::chrono::system_clock::now();
    // A council takes care of the nodes of an elastic job, once all have come.
    const bool has_council = options_.elastic && is_one_of_several();
    const Nodes::Self self{.count = options_.nodes,
                           .rank = options_.node_rank,
                           .ranks_here = options_.ranks,
                           .max_restarts = options_.max_restarts,
                           .address = server_ ? server_->endpoint().host : "",
                           .run_id = run_id_,
                           .where = place_.text(),
                           .keep_alive = transport::keep_alive(),
                           .will = [this](const std::string& key) { return will(key); },
                           .say = [this](const std::string& line) { outputs_.say(line); }};
    Nodes nodes(self, self_store_, restarts);
    NodePlan plan;
    if (options_.join.empty()) plan = signals_.let_through([&] { return nodes.join(within(30min)); });
    const std::string chaos = chaos_for(plan.world_size, restarts);
    if (has_council) return run_ranks(began, restarts, chaos, plan, nodes, epochs_of_several(plan).get());
    nodes.start_watching();
    return run_ranks(began, restarts, chaos, plan, nodes, options_.elastic ? epochs_of(restarts).get() : nullptr);
  }

  std::optional<Halt> run_ranks(std::chrono::system_clock::time_point began, int restarts, const std::string& chaos,
                                const NodePlan& plan, Nodes& nodes, Epochs* epochs) {
    Ranks ranks(plan_of(plan, restarts, chaos), guardian_);
    Start start(options_, signals_, outputs_, ranks, nodes, epochs);
    const std::optional<Halt> halt = start.run();
    interrupted_ = start.was_interrupted();
    if (halt) outputs_.say(summary_of(*halt, start, ranks, began, restarts, options_, flights_));
    if (!halt) flights_.tidy(ranks.rank_of_process());
    if (!ranks.log_problem().empty()) {
      outputs_.say(ranks.log_problem());
      output_is_lost_ = true;
    }
    return halt;
  }

  std::unique_ptr<Epochs> epochs_of(int restarts) {
    board_ = transport::EpochBoard::create();
    auto store = std::make_shared<transport::TcpStore>(server_->endpoint(), secret_, within(30s));
    return std::make_unique<Epochs>(Epochs::Plan{
        .limits = *options_.elastic,
        .ranks = options_.ranks,
        .store = std::make_shared<transport::PrefixStore>(transport::elastic_prefix(restarts), std::move(store)),
        .board = board_,
        .say = [this](const std::string& line) { outputs_.say(line); }});
  }

  // `plan` of a node that joins has nothing in it yet.
  std::unique_ptr<Epochs> epochs_of_several(NodePlan& plan) {
    const auto say = [this](const std::string& line) { outputs_.say(line); };
    board_ = transport::EpochBoard::create();
    const Gathering gathering = signals_.let_through([&] {
      if (!options_.join.empty()) return join_job(place_, secret_, own_place().text(), within(30s));
      const std::string place = own_server_ ? own_place().text() : place_.text();
      return gather(*self_store_, options_.node_rank, options_.nodes, plan, place, within(10min));
    });
    const auto& limits = *options_.elastic;
    const auto founders = gathering.first.founders;
    CHORALE_CHECK(limits.least <= founders && founders <= limits.most, founders,
                  " ranks at the start are not within --elastic ", limits.least, ":", limits.most);
    if (!options_.join.empty()) {
      plan.world_size = founders;
      plan.run_id = run_id_;
      plan.master_addr = place_.host;
      say(concat("node ", gathering.node.number, " joins the job at ", place_.text()));
    }
    auto council = make_council(gathering, {.own = own_place(),
                                            .secret = secret_,
                                            .keep_alive = transport::keep_alive(),
                                            .successor = {.limits = limits, .say = say}});
    return std::make_unique<Epochs>(Epochs::Plan{.limits = limits,
                                                 .ranks = options_.ranks,
                                                 .store = elastic_store(own_place(), secret_, within(30s)),
                                                 .board = board_,
                                                 .say = say,
                                                 .council = std::move(council),
                                                 .node = gathering.node,
                                                 .first = gathering.first,
                                                 .first_member = gathering.first_member,
                                                 .newcomers_from = gathering.newcomers_from()});
  }

  std::shared_ptr<void> will(const std::string& key) const {
    return std::make_shared<transport::StoreWill>(server_ ? server_->endpoint() : place_, secret_, key, "",
                                                  within(30s));
  }

  // The plan in full: a seed needs the number of ranks. A restart is to show that the job recovers, so it has none.
  std::string chaos_for(int world_size, int restarts) {
    if (options_.chaos.empty() || restarts > 0) return "";
    const std::string plan = transport::text_of(transport::chaos_plan(options_.chaos, world_size));
    if (options_.node_rank == 0) outputs_.say(concat("faults on purpose: ", plan));
    return plan;
  }

  Ranks::Plan plan_of(const NodePlan& nodes, int restarts, const std::string& chaos) {
    Ranks::Plan plan = fixed_plan_of(nodes, restarts, chaos);
    plan.environment.merge(mps_.environment());
    if (board_) {
      plan.process.inherited.push_back(board_->descriptor());
      plan.environment["CHORALE_ELASTIC_FD"] = std::to_string(board_->descriptor());
      plan.environment["CHORALE_ELASTIC_STORE"] = own_place().text();
    }
    return plan;
  }

  Ranks::Plan fixed_plan_of(const NodePlan& nodes, int restarts, const std::string& chaos) {
    return {.process = {.program = program_,
                        .arguments = options_.command,
                        .environment = {},
                        .cpus = {},
                        .inherited = {secret_file_.get()}},
            .environment = {{"WORLD_SIZE", std::to_string(nodes.world_size)},
                            {"ROLE_WORLD_SIZE", std::to_string(nodes.world_size)},
                            {"LOCAL_WORLD_SIZE", std::to_string(options_.ranks)},
                            {"GROUP_RANK", std::to_string(options_.node_rank)},
                            {"GROUP_WORLD_SIZE", std::to_string(options_.nodes)},
                            {"MASTER_ADDR", nodes.master_addr},
                            {"MASTER_PORT", std::to_string(nodes.master_port)},
                            {"TORCHELASTIC_RUN_ID", nodes.run_id},
                            {"TORCHELASTIC_RESTART_COUNT", std::to_string(restarts)},
                            {"TORCHELASTIC_MAX_RESTARTS", std::to_string(options_.max_restarts)},
                            {"TORCHELASTIC_USE_AGENT_STORE", ""},
                            {"CHORALE_FLIGHT_DIR", flights_.path()},
                            {"CHORALE_CHAOS", chaos},
                            {"CHORALE_CHECKSUM", options_.checksum ? "1" : ""},
                            {"CHORALE_FABRIC", options_.fabric},
                            {"CHORALE_STORE", place_.text()},
                            {"CHORALE_ELASTIC_FD", ""},
                            {"CHORALE_ELASTIC_STORE", ""},
                            {"CHORALE_SECRET_FD", std::to_string(secret_file_.get())}},
            .cores = cores_,
            .nodes = nodes,
            .log_dir = options_.log_dir,
            .log_suffix = restarts == 0 ? "" : concat(".restart_", restarts),
            .output = &outputs_.output,
            .errors = &outputs_.errors};
  }

  const LaunchOptions& options_;
  const std::string program_;
  const Signals signals_{options_.elastic.has_value()};  // before anything that has a thread
  Outputs outputs_;
  const FlightFolder flights_{options_.log_dir};
  bool output_is_lost_ = false, interrupted_ = false;
  Guardian guardian_;
  // MPS is not used where ranks may die and others go on: a client that is killed may take the others with it.
  const Mps mps_{options_.elastic ? 0 : options_.ranks, guardian_,
                 [this](const std::string& line) { outputs_.say(line); }};
  const std::string run_id_ = concat("chorale-", transport::host_name(), "-", getpid());
  Secret secret_ = Secret::generate();
  std::optional<transport::StoreServer> server_;      // of the job, where this launcher has it
  std::optional<transport::StoreServer> own_server_;  // of this node of an elastic job, where it has not
  Endpoint place_;
  std::shared_ptr<transport::Store> self_store_;
  std::shared_ptr<transport::EpochBoard> board_;  // of an elastic job
  const std::vector<RankCores> cores_ = share_cores(options_.ranks);
  Descriptor secret_file_;
};

}  // namespace

int launch(const LaunchOptions& options) {
  CHORALE_CHECK(!options.command.empty(), "[launch] no program to run");
  transport::default_timeout();  // refuses here, once, a value that every rank would refuse
  check_room({.ranks = options.ranks, .descriptors = options.log_dir.empty() ? 2 : 3});
  std::string program;
  try {
    program = find_program(options.command.front());
  } catch (const InvalidArgument& problem) {
    std::cerr << concat("chorale run: ", problem.what(), "\n");
    return kNoProgram;
  }
  return Launcher(options, std::move(program)).run();
}

}  // namespace chorale::launch
