#include "chorale/launch/start.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <csignal>
#include <sstream>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/transport/host_identity.h"

namespace chorale::launch {
namespace {

using namespace std::chrono_literals;

constexpr int kCannotStart = 126;
constexpr int kNewcomerLookMs = 10;  // whether one is ready
constexpr int64_t kMostRanks = 65536;
constexpr int kStartedAtOnce = 8;  // ranks, before signals are looked at

std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return name ? concat("SIG", name) : concat("signal ", number);
}

}  // namespace

Start::Start(const LaunchOptions& options, const Signals& signals, Outputs& outputs, Ranks& ranks, Nodes& nodes,
             Epochs* epochs)
    : options_(options), signals_(signals), outputs_(outputs), ranks_(ranks), nodes_(nodes), epochs_(epochs) {
  // A node that joins a job has newcomers only.
  if (epochs && epochs->joins()) starting_ = false;
}

std::optional<Halt> Start::run() {
  while (!is_over()) {
    if (starting_) start_some();
    std::vector<pollfd> wanted = ranks_.streams();
    wanted.push_back({signals_.descriptor(), POLLIN, 0});
    for (const int bell : {nodes_.wake_up(), outputs_.output.wake_up(), outputs_.errors.wake_up()})
      wanted.push_back({bell, POLLIN, 0});
    if (control_ && control_->descriptor() >= 0) wanted.push_back({control_->descriptor(), POLLIN, 0});
    poll(wanted.data(), wanted.size(), starting_ ? 0 : (epochs_ && epochs_->is_restless() ? kNewcomerLookMs : 100));
    outputs_.output.woken();
    outputs_.errors.woken();
    ranks_.forward(wanted);
    if (outputs_.have_lost_a_reader()) interrupt(SIGPIPE);
    for (const int number : signals_.take()) {
      if (number != SIGCHLD) interrupt(number);
    }
    look_at(ranks_.reap());
    if (control_) control_->answer([this](const std::string& request) { return reply_to(request); });
    if (council()) hear_of_halts();
    if (epochs_ && !starting_ && !stopping_ && !nodes_.halted() && (council() || ranks_.any_running())) keep_going();
    if (!stopping_ && nodes_.halted()) stop(SIGTERM);
    if (stopping_ && !killed_ && Deadline::Clock::now() >= kill_at_)
      kill_all(fmt::format("SIGKILL, {:g} s after {}", std::chrono::duration<double>(options_.grace).count(),
                           signal_name(stopped_by_)));
  }
  return nodes_.halted();
}

std::string Start::others() const {
  return fmt::format("{} ended well, {} stopped{}", ended_well_, stopped_,
                     killed_ ? " (some with " + how_killed_ + ")" : "");
}

void Start::start_some() {
  starting_ = false;
  if (stopping_ || nodes_.halted()) return;
  try {
    starting_ = ranks_.start_some(kStartedAtOnce);
  } catch (const StateError& problem) {
    nodes_.halt({problem.what(), kCannotStart, false});
  }
}

void Start::hear_of_halts() {
  if (const auto here = nodes_.halted()) return council()->halt(concat(here->exit_status, " ", here->reason));
  const auto there = council()->halted();
  if (!there) return;
  Halt why{"", 1, false};
  std::istringstream words(*there);
  words >> why.exit_status;
  std::getline(words >> std::ws, why.reason);
  nodes_.halt(why);
}

void Start::look_at(std::vector<RankEnd> ends) {
  // Where several have ended since the last look, one killed by a signal is more likely the cause than one that gave up
  // with an exit code.
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
  if (council()) return;  // nodes that go on may need this one again
  if (lost_ && !epochs_->is_done())
    return nodes_.halt({concat("no rank is left; the first that failed was ", describe_end(*lost_)),
                        exit_status_of(lost_->wait_status), true});
  finished_ = true;
  nodes_.finish();
}

std::string Start::describe_end(const RankEnd& end) {
  return concat("rank ", end.rank, " on ", transport::host_name(), ": ", describe(end.wait_status));
}

bool Start::goes_on_after(const RankEnd& end) {
  if (!epochs_ || stopping_ || culprit_ || nodes_.halted()) return false;
  if (end.failed() && is_final(exit_status_of(end.wait_status))) return false;
  if (end.failed() && epochs_->is_done() && epochs_->has_taken_part(end.rank)) return false;
  const bool is_leaving = epochs_->is_leaving(end.rank);
  epochs_->ended(end.rank, end.failed() ? std::optional(concat("died: ", describe(end.wait_status))) : std::nullopt);
  if (end.failed()) {
    if (!lost_ && !is_leaving) lost_ = end;
    ++stopped_;
  }
  return true;
}

void Start::keep_going() {
  if (const auto now = Deadline::Clock::now(); now >= look_for_stopped_at_) {
    look_for_stopped_at_ = now + std::min<std::chrono::milliseconds>(stop_patience_ / 4, 500ms);
    for (const int rank : ranks_.kill_stopped(stop_patience_))
      outputs_.say(fmt::format("member {} was stopped for {:g} s (CHORALE_STOP_PATIENCE): it is killed", rank,
                               std::chrono::duration<double>(stop_patience_).count()));
  }
  for (const int member : epochs_->superfluous()) ranks_.kill_one(member);
  for (const int slot : epochs_->vacancies()) {
    const int member = epochs_->started(slot);
    try {
      ranks_.start_in_place(slot, member);
    } catch (const StateError& problem) {  // the others are well
      outputs_.say(fmt::format("member {} could not be started: {}", member, problem.what()));
      epochs_->ended(member, "could not be started");
    }
  }
  if (const auto problem = epochs_->look()) {
    nodes_.halt({*problem, lost_ && !council() ? exit_status_of(lost_->wait_status) : 1, !council()});
    // The others may go on without this node: nothing of it may touch what is the job's.
    if (council()) kill_all("SIGKILL, since this node is not in the job any more");
  }
  if (!council() || !council()->all_finished() || !epochs_->is_finished() || std::exchange(finished_, true)) return;
  if (lost_ && !epochs_->is_done() && !epochs_->is_given_back())
    return nodes_.halt({concat("no rank is left; the first that failed here was ", describe_end(*lost_)),
                        exit_status_of(lost_->wait_status), false});
  nodes_.finish();
}

std::string Start::reply_to(const std::string& request) {
  std::istringstream words(request);
  std::string command;
  int64_t ranks = 0;
  if (!(words >> command >> ranks) || command != "resize" || ranks < 1 || ranks > kMostRanks)
    return "refused: not a request that this launcher knows";
  if (starting_ || stopping_ || nodes_.halted()) return "refused: the job has not begun, or ends";
  return epochs_->resize(static_cast<int>(ranks));
}

bool Start::is_final(int status) const {
  const std::vector<int>& all = options_.final_statuses;
  return std::find(all.begin(), all.end(), status) != all.end();
}

void Start::interrupt(int number) {
  if (number == interrupted_ && number == SIGPIPE) return;
  if (interrupted_ == SIGUSR1 && number == SIGTERM) {  // a batch system wants the node, and then ends its job
    interrupted_ = number;
    return;
  }
  if (interrupted_ != 0) return kill_all(concat("SIGKILL, after a second signal, ", signal_name(number)));
  if (number == SIGUSR1 && council() && !starting_ && !stopping_ && (epochs_->is_given_back() || epochs_->give_back()))
    return;
  interrupted_ = number;
  nodes_.halt({number == SIGPIPE   ? "nobody reads the output"
               : number == SIGUSR1 ? "SIGUSR1: this node is wanted back, and the job cannot go on without it"
                                   : "stopped by " + signal_name(number),
               128 + number, false});
  stop(number == SIGPIPE || number == SIGUSR1 ? SIGTERM : number);
}

void Start::stop(int number) {
  if (epochs_) epochs_->stop();
  ranks_.signal(number);
  ranks_.signal(SIGCONT);  // a stopped process does not see the signal
  if (!std::exchange(stopping_, true)) {
    kill_at_ = Deadline::Clock::now() + options_.grace;
    stopped_by_ = number;
  }
}

void Start::kill_all(std::string how) {
  killed_ = ranks_.any_running();
  how_killed_ = std::move(how);
  ranks_.signal(SIGKILL);
}

bool Start::is_over() {
  if (ranks_.any_running() || !(nodes_.halted() || nodes_.all_finished())) return false;
  // What is in the pipes is still shown; a process that got away may keep them open. A reader that is behind is
  // waited for, unless somebody wants an end.
  if (!ranks_.may_print()) return true;
  const bool waits_for_reader = !outputs_.output.has_room() || !outputs_.errors.has_room();
  if (!drained_by_ || (waits_for_reader && interrupted_ == 0)) drained_by_ = Deadline::Clock::now() + 500ms;
  return Deadline::Clock::now() >= *drained_by_;
}

}  // namespace chorale::launch
