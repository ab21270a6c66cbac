// Inside rpc: what an agent does, without the types of functions: requests and their answers, timeouts, retries,
// faults, shutdown.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "chorale/base/rpc_error.h"
#include "chorale/dist_autograd/contexts.h"
#include "chorale/rpc/agent_options.h"
#include "chorale/rpc/call_log.h"
#include "chorale/rpc/control_numbers.h"
#include "chorale/rpc/courier.h"
#include "chorale/rpc/crew.h"
#include "chorale/rpc/membership.h"
#include "chorale/rpc/post.h"
#include "chorale/rpc/references.h"
#include "chorale/rpc/roster.h"
#include "chorale/rpc/timer.h"
#include "chorale/rpc/worker.h"

namespace chorale::rpc {

// A function that this thread runs for another worker.
struct Serving {
  Core& core;
  const int from;
  Serving* const before;
  Serving(Core& whose, int caller);
  ~Serving();
  Serving(const Serving&) = delete;
  Serving& operator=(const Serving&) = delete;
  static const Serving* current();
};

std::exception_ptr error_of(RpcErrorKind kind, int worker, const std::string& text);

// What became of a request: an answer, or an error (null: none).
using Answered = std::function<void(Message answer, const std::exception_ptr& error)>;

struct RequestOptions {
  std::optional<Timeout> timeout{};  // none: the agent's
  FutureState* future = nullptr;     // that `answered` completes: with callbacks it is completed by the crew
  bool internal = false;             // allowed while the agent shuts down
  Answered late{};                   // an answer that came after the timeout
  bool reads_late = false;           // or `answered` takes that, too: it may have references
  bool of_backward = false;          // an answer with tensors goes on with a backward
};

class Core : public std::enable_shared_from_this<Core> {
 public:
  static std::shared_ptr<Core> start(const comm::Group& group, AgentOptions options);
  // Joins a group that changes (Note [Groups that change] in rpc/membership.h).
  static std::shared_ptr<Core> join(std::shared_ptr<transport::Store> store, AgentOptions options);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  int own() const { return own_; }
  // What ends when the agent does.
  void hold(std::unique_ptr<StaticUse> use) { use_ = std::move(use); }
  const WorkerInfo& own_info() const { return own_info_; }
  const Roster& roster() const { return roster_; }
  // In a group that changes a worker may be known to others before it has met this one.
  bool awaits_worker(int id);
  std::weak_ptr<Core> weak() { return weak_from_this(); }
  bool is_running() const { return state_ == State::kRuns || state_ == State::kLeaves; }
  std::shared_ptr<Helper> helper() { return {shared_from_this(), crew_.get()}; }
  Crew& crew() { return *crew_; }
  Timer& timer() { return timer_; }
  References& references() { return references_; }
  dist_autograd::Contexts& contexts() { return contexts_; }
  const AgentOptions& options() const { return options_; }
  const CallLog& log() const { return log_; }
  Timeout default_timeout() const { return Timeout(timeout_ns_.load()); }
  void set_default_timeout(Timeout timeout);

  // ---- requests of this worker
  void request(int to, Message message, RequestOptions options, Answered answered);
  // Sent again when it fails (A1: control messages only). `done` gets null, or the last error.
  void send_control(int to, Message message, std::function<void(const std::exception_ptr&)> done = {});
  // The call that makes the value of a reference.
  void remote(const std::shared_ptr<Reference>& reference, MessageKind kind, std::optional<Timeout> timeout,
              Writer arguments);
  // Backward from a value of this worker (rpc/rref.h).
  void backward_from(const OwnerReference& reference, uint64_t context, bool retain_graph);
  // Puts a message into the thread's context of distributed autograd, if it has one.
  void record(Message& message, int to, bool forced);
  // Answers to requests of others.
  void answer(int to, uint64_t id, Message message);
  void answer_error(int to, uint64_t id, const std::exception_ptr& error);
  // Answers a call that is not run, after the first `taken` of its references were taken. Without an error, the error
  // is kept for a reference.
  void answer_refusal(int to, uint64_t id, size_t taken, const std::exception_ptr& error);
  // Waits until `holds`, which is asked again after every note_change(); reads meanwhile. False when the deadline has
  // passed.
  bool wait_until(const std::function<bool()>& holds, Deadline deadline);
  void note_change();

  // ---- the end
  void barrier(const std::vector<std::string>& names, Timeout timeout);
  std::map<std::string, Bytes> all_gather(const std::vector<std::string>& names, Bytes own, Timeout timeout);
  void shut_down(bool graceful, Timeout timeout);

  // Calls in flight: of this worker's own; of others', and those of them that wait for a future.
  struct Calls {
    int64_t own = 0, served = 0, served_later = 0;
    int64_t started = 0;  // requests of this worker so far
  };
  Calls calls() const;

 private:
  enum class State { kStarts, kRuns, kLeaves, kStopped };
  struct Pending {
    int to = -1;
    Deadline::Clock::time_point end{};
    Timeout limit{};
    FutureState* future = nullptr;
    Answered answered;
    Answered late;
    std::vector<base::Intrusive<Storage>> lent{};  // Note [Messages on the wire]
    std::shared_ptr<PassedOn> passed{};
    bool reads_late = false, of_backward = false;
    uint64_t context = 0;
    CallLog::Ticket logged{};
  };
  // A request whose time is over; what its answer must still do.
  struct Late {
    int to = -1;
    Answered answered;
    std::shared_ptr<PassedOn> passed{};
    uint64_t context = 0;
  };
  // What an answer needs of its request.
  struct Asked {
    uint64_t id = 0, context = 0;
  };
  struct Gathering;  // barrier.cc
  struct Control;    // core.cc: a control message until it is answered
  // A worker may get a number that another one had. Its references and contexts are numbered from its ticket << this,
  // so that they differ from those of the other.
  static constexpr int kBitsPerTicket = 30;

  Core(comm::Group group, WorkerInfo own, AgentOptions options, uint64_t ticket);
  static void check_no_other(const comm::Group& group);
  static void check_options(const AgentOptions& options);
  void start_crew(int rank);
  void forget_agent() const;
  void say_hello();
  std::string flight_of(int worker, const std::string& reason);
  // True: this is news.
  bool note_gone(int worker, uint64_t ticket, const std::string& reason);
  void drop_gone(int worker, uint64_t ticket, const std::string& reason);
  Job sort(Arrival arrival);
  Job sort_answer(int from, Message message);
  void done_answering();
  // What waits and what lives on this worker, for the trace.
  void trace_counts();
  void send(int to, Message message, uint64_t id);
  void deliver(int to, Message message);
  // Delivers a message for the second time, later if the faults say so.
  void deliver_again(int to, Message message);
  // Sends a message at once, or later if the faults say so.
  template <class Send>
  void send_when_due(int to, Message message, const Send& send) {
    const auto delay = options_.faults.empty() ? std::chrono::nanoseconds(0) : delay_of(message.kind);
    if (delay.count() == 0) return send(std::move(message));
    send_later(delay, to, std::move(message), send);
  }
  void send_later(std::chrono::nanoseconds delay, int to, Message message, const std::function<void(Message)>& send);
  std::chrono::nanoseconds delay_of(MessageKind kind);
  uint64_t draw();
  static void stay_here(Message& message);
  bool fails_on_purpose(int to, const Message& message);
  void try_control(const std::shared_ptr<Control>& control);
  void fail(uint64_t id, const std::exception_ptr& error);
  void fail_all(int worker, const std::string& reason);
  void time_out(uint64_t id);
  static std::exception_ptr error_in(Reader reader);

  // serve.cc
  void answer_now(int to, uint64_t id, Message message);
  void serve(int from, Message request);
  void serve_once(int from, Message request);
  void serve_call(int from, Message request);
  std::function<void(const Reply&)> prepare_op(Reader& reader) const;
  std::function<void(const Reply&)> prepare_function(Reader& reader) const;
  void serve_fetch(int from, const Message& request);
  void serve_type(int from, const Message& request);
  void serve_ref_backward(int from, const Message& request);
  void serve_control(int from, const Message& request);
  void answer_value(int to, const Asked& request, AnyValue value, const std::exception_ptr& error);
  std::exception_ptr at_home(const std::exception_ptr& error) const;
  void log_thrown(int caller, const std::exception_ptr& error) const;
  const Served& find_function(const std::string& name, const std::string& signature) const;

  // barrier.cc
  void serve_gather(int from, const Message& request);
  std::shared_ptr<Gathering> gathering(const std::string& key);
  void add_to_gathering(Gathering& gathering, const std::string& name, Bytes value, size_t of);
  static void fail_gathering(Gathering& gathering, const std::exception_ptr& error);
  void fail_gatherings(int worker, const std::string& reason);
  void fail_gatherings_of_the_gone();
  [[noreturn]] void raise_for_the_dead(const std::vector<int>& workers, const std::exception_ptr& error);

  // leaving.cc
  void leave_gracefully(Timeout timeout);
  void leave_alone(Timeout timeout);
  void end_waits(const std::exception_ptr& error);
  int64_t own_calls() const;
  // Calls of this worker that can still lead to others: those in flight, and those of which the answer is being dealt
  // with.
  struct Unfinished {
    int64_t calls = 0;
    uint64_t begun = 0;  // since the agent was made
  };
  Unfinished unfinished() const;

  AgentOptions options_;
  const int own_;
  const WorkerInfo own_info_;
  Roster roster_;
  std::unique_ptr<Membership> membership_{};  // of a group that changes
  std::unique_ptr<StaticUse> use_{};
  // Functions are found by name and signature, since instances of one template have the same name in some compilers.
  std::map<std::string, const Served*, std::less<>> functions_;
  std::atomic<State> state_{State::kStarts};
  std::atomic<int64_t> timeout_ns_;
  Post post_;
  References references_;
  RpcCourier courier_{*this};
  dist_autograd::Contexts contexts_;
  Timer timer_;
  CallLog log_;
  ControlNumbers control_numbers_;

  mutable std::mutex mutex_;
  uint64_t next_request_ = 1;
  uint64_t calls_begun_ = 0;  // requests other than those of barriers
  int64_t answering_ = 0;     // calls whose answer has come, and what follows from it may not be done
  std::unordered_map<uint64_t, Pending> pending_;
  std::unordered_map<uint64_t, Late> late_;
  std::map<int, std::string> gone_;          // workers, and why
  std::map<std::string, int> failed_sends_;  // faults: how often each request has failed
  std::atomic<int64_t> served_{0}, served_later_{0}, gathers_{0};
  std::atomic<bool> is_awaited_{false};                 // a thread is in wait_until()
  std::shared_ptr<Future<void>::State> next_change_{};  // for that, with the lock
  std::atomic<uint64_t> drawn_{0};                      // of faults: numbers so far,
  std::atomic<int64_t> delayed_{0};                     // and messages that are sent later
  std::map<std::string, std::shared_ptr<Gathering>> gatherings_;
  std::map<std::string, uint64_t> gather_numbers_;
  std::unique_ptr<Crew> crew_;  // last: its threads use all of the above
};

}  // namespace chorale::rpc
