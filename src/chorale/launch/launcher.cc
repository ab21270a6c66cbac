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
#include "chorale/launch/control.h"
#include "chorale/launch/epochs.h"
#include "chorale/launch/last_calls.h"
#include "chorale/launch/mps.h"
#include "chorale/launch/ranks.h"
#include "chorale/launch/room.h"
#include "chorale/launch/signals.h"
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

constexpr int kCannotStart = 126, kNoProgram = 127;
constexpr auto kLeavingTime = 1500ms;
constexpr int kNewcomerLookMs = 10;  // whether one is ready
constexpr int64_t kMostRanks = 65536;
constexpr int kStartedAtOnce = 8;  // ranks, before signals are looked at

std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return name ? concat("SIG", name) : concat("signal ", number);
}

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
        Epochs* epochs)
      : options_(options), signals_(signals), outputs_(outputs), ranks_(ranks), nodes_(nodes), epochs_(epochs) {}

  // Nothing when every rank of every node ended well.
  std::optional<Halt> run() {
    while (!is_over()) {
      if (starting_) start_some();
      std::vector<pollfd> wanted = ranks_.streams();
      wanted.push_back({signals_.descriptor(), POLLIN, 0});
      for (const int bell : {nodes_.wake_up(), outputs_.output.wake_up(), outputs_.errors.wake_up()})
        wanted.push_back({bell, POLLIN, 0});
      if (control_ && control_->descriptor() >= 0) wanted.push_back({control_->descriptor(), POLLIN, 0});
      poll(wanted.data(), wanted.size(),
           starting_ ? 0 : (epochs_ && epochs_->awaits_newcomers() ? kNewcomerLookMs : 100));
      outputs_.output.woken();
      outputs_.errors.woken();
      ranks_.forward(wanted);
      if (outputs_.have_lost_a_reader()) interrupt(SIGPIPE);
      for (const int number : signals_.take()) {
        if (number != SIGCHLD) interrupt(number);
      }
      look_at(ranks_.reap());
      if (control_) control_->answer([this](const std::string& request) { return reply_to(request); });
      if (epochs_ && !starting_ && !stopping_ && !nodes_.halted() && ranks_.any_running()) keep_going();
      if (!stopping_ && nodes_.halted()) stop(SIGTERM);
      if (stopping_ && !killed_ && Deadline::Clock::now() >= kill_at_)
        kill_all(fmt::format("SIGKILL, {:g} s after {}", std::chrono::duration<double>(options_.grace).count(),
                             signal_name(stopped_by_)));
    }
    return nodes_.halted();
  }

  // By a signal, or for want of a reader.
  bool was_interrupted() const { return interrupted_ != 0; }
  // The rank of this node that failed first.
  const std::optional<RankEnd>& culprit() const { return culprit_; }
  std::string others() const {
    return fmt::format("{} ended well, {} stopped{}", ended_well_, stopped_,
                       killed_ ? " (some with " + how_killed_ + ")" : "");
  }

 private:
  void start_some() {
    starting_ = false;
    if (stopping_ || nodes_.halted()) return;
    try {
      starting_ = ranks_.start_some(kStartedAtOnce);
    } catch (const StateError& problem) {
      nodes_.halt({problem.what(), kCannotStart, false});
    }
  }

  void look_at(std::vector<RankEnd> ends) {
    // Of several that have ended since the last look, one killed by a signal is more likely the cause than one that
    // gave up with an exit code.
    std::stable_sort(ends.begin(), ends.end(), [](const RankEnd& a, const RankEnd& b) {
      return WIFSIGNALED(a.wait_status) > WIFSIGNALED(b.wait_status);
    });
    for (const RankEnd& end : ends) {
      if (!end.failed()) ++ended_well_;
      if (goes_on_after(end)) continue;
      if (!end.failed()) continue;
      if (stopping_ || culprit_ || nodes_.halted()) {
        ++stopped_;
      } else {
        culprit_ = end;
        nodes_.halt({concat("rank ", end.rank, " on ", transport::host_name(), " failed: ", describe(end.wait_status)),
                     exit_status_of(end.wait_status), !is_final(exit_status_of(end.wait_status))});
        stop(SIGTERM);
      }
    }
    if (ranks_.any_running() || starting_ || stopping_ || finished_) return;
    if (lost_ && !epochs_->is_done())
      return nodes_.halt({concat("no rank is left; the first that failed was ", describe_end(*lost_)),
                          exit_status_of(lost_->wait_status), true});
    finished_ = true;
    nodes_.finish();
  }

  static std::string describe_end(const RankEnd& end) {
    return concat("rank ", end.rank, " on ", transport::host_name(), ": ", describe(end.wait_status));
  }

  // Whether the end of a rank is for the epochs to deal with.
  bool goes_on_after(const RankEnd& end) {
    if (!epochs_ || stopping_ || culprit_ || nodes_.halted()) return false;
    if (end.failed() && is_final(exit_status_of(end.wait_status))) return false;
    if (end.failed() && epochs_->is_done() && epochs_->has_taken_part(end.rank)) return false;
    epochs_->ended(end.rank, end.failed() ? std::optional(concat("died: ", describe(end.wait_status))) : std::nullopt);
    if (end.failed()) {
      if (!lost_) lost_ = end;
      ++stopped_;
    }
    return true;
  }

  void keep_going() {
    if (const auto now = Deadline::Clock::now(); now >= look_for_stopped_at_) {
      look_for_stopped_at_ = now + std::min<std::chrono::milliseconds>(stop_patience_ / 4, 500ms);
      for (const int rank : ranks_.kill_stopped(stop_patience_))
        outputs_.say(fmt::format("member {} was stopped for {:g} s (CHORALE_STOP_PATIENCE): it is killed", rank,
                                 std::chrono::duration<double>(stop_patience_).count()));
    }
    for (const int member : epochs_->superfluous()) ranks_.kill_one(member);
    for (const int slot : epochs_->vacancies()) {
      try {
        ranks_.start_in_place(slot, epochs_->started(slot));
      } catch (const StateError& problem) {
        return nodes_.halt({problem.what(), kCannotStart, false});
      }
    }
    if (const auto problem = epochs_->look())
      nodes_.halt({*problem, lost_ ? exit_status_of(lost_->wait_status) : 1, true});
  }

  std::string reply_to(const std::string& request) {
    std::istringstream words(request);
    std::string command;
    int64_t ranks = 0;
    if (!(words >> command >> ranks) || command != "resize" || ranks > kMostRanks)
      return "refused: not a request that this launcher knows";
    if (starting_ || stopping_ || nodes_.halted()) return "refused: the job has not begun, or ends";
    return epochs_->resize(static_cast<int>(ranks));
  }

  bool is_final(int status) const {
    const std::vector<int>& all = options_.final_statuses;
    return std::find(all.begin(), all.end(), status) != all.end();
  }

  void interrupt(int number) {
    if (number == interrupted_ && number == SIGPIPE) return;
    if (interrupted_ != 0) return kill_all(concat("SIGKILL, after a second signal, ", signal_name(number)));
    interrupted_ = number;
    nodes_.halt({number == SIGPIPE   ? "nobody reads the output"
                 : number == SIGUSR1 ? "SIGUSR1: this node is wanted back, and the job has no other"
                                     : "stopped by " + signal_name(number),
                 128 + number, false});
    stop(number == SIGPIPE || number == SIGUSR1 ? SIGTERM : number);
  }

  void stop(int number) {
    ranks_.signal(number);
    ranks_.signal(SIGCONT);  // a stopped process does not see the signal
    if (!std::exchange(stopping_, true)) {
      kill_at_ = Deadline::Clock::now() + options_.grace;
      stopped_by_ = number;
    }
  }

  void kill_all(std::string how) {
    killed_ = ranks_.any_running();
    how_killed_ = std::move(how);
    ranks_.signal(SIGKILL);
  }

  bool is_over() {
    if (ranks_.any_running() || !(nodes_.halted() || nodes_.all_finished())) return false;
    // What is in the pipes is still shown; a process that got away may keep them open. A reader that is behind is
    // waited for, unless somebody wants an end.
    if (!ranks_.may_print()) return true;
    const bool waits_for_reader = !outputs_.output.has_room() || !outputs_.errors.has_room();
    if (!drained_by_ || (waits_for_reader && interrupted_ == 0)) drained_by_ = Deadline::Clock::now() + 500ms;
    return Deadline::Clock::now() >= *drained_by_;
  }

  const LaunchOptions& options_;
  const Signals& signals_;
  Outputs& outputs_;
  Ranks& ranks_;
  Nodes& nodes_;
  Epochs* const epochs_;
  const std::optional<Control> control_ = epochs_ ? std::optional<Control>(std::in_place) : std::nullopt;
  const std::chrono::milliseconds stop_patience_ = epochs_ ? transport::stop_patience() : 0ms;
  std::optional<RankEnd> lost_;  // the first rank that died, where the job goes on
  std::optional<RankEnd> culprit_;
  int ended_well_ = 0, stopped_ = 0;
  int interrupted_ = 0, stopped_by_ = 0;
  std::string how_killed_;
  bool starting_ = true, stopping_ = false, killed_ = false, finished_ = false;
  Deadline::Clock::time_point kill_at_{}, look_for_stopped_at_{};
  std::optional<Deadline::Clock::time_point> drained_by_;
};

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
    CHORALE_CHECK(!options.elastic || (options.nodes == 1 && options.elastic->least <= options.ranks &&
                                       options.ranks <= options.elastic->most),
                  "[launch] an elastic job has one node, and from the start as many ranks as it may have");
    auto secret = Secret::from_environment();
    if (secret) secret_ = *secret;
    secret_file_ = Descriptor(secret_.to_descriptor());
    if (options.nodes == 1) {
      server_.emplace(Endpoint::tcp("127.0.0.1", 0), secret_);
      place_ = server_->endpoint();
      self_store_ = std::make_shared<transport::MemoryStore>();
      return;
    }
    CHORALE_CHECK(!options.rendezvous.empty(), "[launch] several nodes meet at node 0: --rdzv HOST:PORT");
    CHORALE_CHECK(secret,
                  "[launch] several nodes need a secret: set CHORALE_SECRET_FILE to a file with the same secret on "
                  "every node (openssl rand -hex 32 >secret; chmod 600 secret)");
    place_ = Endpoint::parse(options.rendezvous);
    CHORALE_CHECK(!place_.is_unix() && place_.port != 0, "[launch] --rdzv must be HOST:PORT, not ", options.rendezvous);
    if (options.node_rank == 0) server_.emplace(transport::listening_place(place_), secret_);
    self_store_ = signals_.let_through([&] {
      if (options.node_rank != 0)
        outputs_.say(concat("node ", options.node_rank, " looks for node 0 at ", place_.text()));
      return std::make_shared<transport::TcpStore>(server_ ? server_->endpoint() : place_, secret_, within(30min));
    });
  }

  ~Launcher() {
    self_store_.reset();
    if (!server_ || options_.nodes == 1) return;
    // The other nodes still have to read how it ended; they look five times a second.
    signals_.let_through([&] { server_->wait_for_clients_to_leave(within(kLeavingTime)); });
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  int run() {
    const int status = run_to_the_end();
    finish_output();
    return status == 0 && output_is_lost_ ? kOutputLost : status;
  }

 private:
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
    Nodes nodes({.count = options_.nodes,
                 .rank = options_.node_rank,
                 .ranks_here = options_.ranks,
                 .max_restarts = options_.max_restarts,
                 .address = server_ ? server_->endpoint().host : "",
                 .run_id = run_id_,
                 .where = place_.text(),
                 .keep_alive = transport::keep_alive(),
                 .will = [this](const std::string& key) { return will(key); },
                 .say = [this](const std::string& line) { outputs_.say(line); }},
                self_store_, restarts);
    const NodePlan plan = signals_.let_through([&] { return nodes.join(within(30min)); });
    const std::string chaos = chaos_for(plan.world_size, restarts);
    nodes.start_watching();
    const std::unique_ptr<Epochs> epochs = epochs_of(restarts);
    Ranks ranks(plan_of(plan, restarts, chaos), guardian_);
    Start start(options_, signals_, outputs_, ranks, nodes, epochs.get());
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

  // Null where the job is not elastic.
  std::unique_ptr<Epochs> epochs_of(int restarts) {
    if (!options_.elastic) return nullptr;
    board_ = transport::EpochBoard::create();
    auto store = std::make_shared<transport::TcpStore>(server_->endpoint(), secret_, within(30s));
    return std::make_unique<Epochs>(Epochs::Plan{
        .limits = *options_.elastic,
        .ranks = options_.ranks,
        .store = std::make_shared<transport::PrefixStore>(transport::elastic_prefix(restarts), std::move(store)),
        .board = board_,
        .say = [this](const std::string& line) { outputs_.say(line); }});
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
  // Not where ranks may die and others go on: a client that is killed may take the others with it.
  const Mps mps_{options_.elastic ? 0 : options_.ranks, guardian_,
                 [this](const std::string& line) { outputs_.say(line); }};
  const std::string run_id_ = concat("chorale-", transport::host_name(), "-", getpid());
  Secret secret_ = Secret::generate();
  std::optional<transport::StoreServer> server_;
  Endpoint place_;
  std::shared_ptr<transport::Store> self_store_;
  std::shared_ptr<transport::EpochBoard> board_;  // of an elastic job
  const std::vector<RankCores> cores_ = share_cores(options_.ranks);
  Descriptor secret_file_;
};

}  // namespace

int launch(const LaunchOptions& options) {
  CHORALE_CHECK(!options.command.empty(), "[launch] no program to run");
  transport::default_timeout();  // a value that ranks would refuse is refused once
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
