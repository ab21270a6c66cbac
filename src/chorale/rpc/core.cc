#include "chorale/rpc/core.h"

#include <algorithm>
#include <cmath>

#include "chorale/autograd/autograd.h"
#include "chorale/base/log.h"
#include "chorale/comm/flight_file.h"
#include "chorale/comm/lent_parcels.h"
#include "chorale/comm/objects.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;

constexpr int kMostRetries = 5, kMostCleanupRetries = 20;
constexpr size_t kMostNameBytes = 127;

// Why this is no name for a worker; empty when it is one.
std::string flaw_of(const std::string& name) {
  if (name.empty()) return "it is empty";
  if (name.size() > kMostNameBytes) return concat("it has ", name.size(), " characters, and must have less than 128");
  const bool known = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == ':';
  });
  return known ? "" : "its characters must be letters, digits, '-', '_' or ':'";
}

std::exception_ptr error_of(RpcErrorKind kind, int worker, const std::string& text) {
  return std::make_exception_ptr(RpcError(kind, worker, text));
}

// The storages of a call's large tensors.
std::vector<Intrusive<Storage>> lent_in(const Message& message) {
  std::vector<Intrusive<Storage>> lent;
  if (!is_call(message.kind)) return lent;
  const auto add = [&](const Tensor& x) {
    if (x.device() == kCpu && x.storage() && x.storage()->bytes() >= kApartBytes) lent.push_back(x.storage());
  };
  for (const Tensor& x : message.tensors) {
    if (x.is_sparse()) {
      add(x.sparse().indices);
      add(x.sparse().values);
    } else if (!x.extension()) {
      add(x);
    }
  }
  return lent;
}

}  // namespace

// Which groups have an agent.
struct RunningAgents {
  std::mutex mutex;
  std::map<const Core*, std::weak_ptr<comm::Engine>> groups;
};
namespace {
RunningAgents& running_agents() {
  static RunningAgents agents;
  return agents;
}
}  // namespace

void Core::check_no_other(const comm::Group& group) {
  RunningAgents& agents = running_agents();
  const std::lock_guard lock(agents.mutex);
  for (const auto& [core, engine] : agents.groups) {
    if (engine.lock() == group.engine())
      throw RpcError(RpcErrorKind::kAlreadyRunning, group.rank(),
                     concat("[rpc] group '", group.name(), "' has an agent already; shut that one down first"));
  }
}

std::shared_ptr<Core> Core::start(const comm::Group& group, AgentOptions options) {
  CHORALE_CHECK(group.is_member(), "[rpc] an agent needs a group that this rank is in");
  check_no_other(group);
  CHORALE_CHECK(options.timeout.count() >= 0, "[rpc] the time for an answer cannot be negative; 0 means for ever");
  CHORALE_CHECK(options.threads >= 1 && options.most_threads >= options.threads, "[rpc] an agent needs at least one ",
                "thread, and at most most_threads = ", options.most_threads, ", not ", options.threads);
  std::shared_ptr<Core> core(new Core(group, std::move(options)));
  core->crew_ = std::make_unique<Crew>(
      core->post_, [raw = core.get()](Arrival arrival) { return raw->sort(std::move(arrival)); },
      CrewOptions{core->options_.threads, core->options_.most_threads, group.global_rank(group.rank())});
  core->state_ = State::kRuns;
  RunningAgents& agents = running_agents();
  const std::lock_guard lock(agents.mutex);
  agents.groups.emplace(core.get(), group.engine());
  return core;
}

Core::Core(const comm::Group& group, AgentOptions options)
    : options_(std::move(options)),
      own_(group.rank()),
      timeout_ns_(options_.timeout.count()),
      post_((exchange_names(group), group.duplicate())),
      contexts_(own_, courier_, options_.backward) {
  for (const Served& function : options_.serves) functions_.emplace(function.name, &function);
}

Core::~Core() { shut_down(false, 0ns); }

// Names travel before they are judged, so that all ranks learn of a bad one.
void Core::exchange_names(const comm::Group& group) {
  const std::string own = options_.name ? *options_.name : concat("worker", own_);
  for (const comm::Value& name : comm::all_gather_object(group, own)) {
    workers_.push_back({name.as<std::string>(), static_cast<int>(workers_.size())});
  }
  for (const WorkerInfo& worker : workers_) {
    if (const std::string flaw = flaw_of(worker.name); !flaw.empty())
      throw RpcError(RpcErrorKind::kBadName, worker.id,
                     concat("[rpc] '", worker.name.substr(0, 200), "' is no name for worker ", worker.id, ": ", flaw));
    const auto [there, fresh] = by_name_.emplace(worker.name, worker.id);
    if (!fresh)
      throw RpcError(RpcErrorKind::kDuplicateName, worker.id,
                     concat("[rpc] workers ", there->second, " and ", worker.id, " are both called '", worker.name,
                            "'; give each its own name"));
  }
}

const WorkerInfo& Core::worker(const To& to) const {
  const auto unknown = [&](const auto& what) -> RpcError {
    std::string names;
    for (const WorkerInfo& worker : workers_) names += concat(names.empty() ? "" : ", ", worker.name);
    return {RpcErrorKind::kUnknownWorker, -1, concat("[rpc] there is no worker ", what, "; there are ", names)};
  };
  if (const auto* name = std::get_if<std::string>(&to.worker())) {
    const auto found = by_name_.find(*name);
    if (found == by_name_.end()) throw unknown("'" + *name + "'");
    return workers_[static_cast<size_t>(found->second)];
  }
  const int64_t id = std::get<int64_t>(to.worker());
  if (id < 0 || id >= size()) throw unknown(id);
  return workers_[static_cast<size_t>(id)];
}

void Core::set_default_timeout(Timeout timeout) {
  CHORALE_CHECK(timeout.count() >= 0, "[rpc] the time for an answer cannot be negative; 0 means for ever");
  timeout_ns_ = timeout.count();
}

// ---- requests

void Core::request(int to, Message message, RequestOptions options, Answered answered) {
  if (!is_running()) return answered({}, error_of(RpcErrorKind::kNotRunning, own_, "[rpc] the agent was shut down"));
  CHORALE_INVARIANT(is_request(message.kind), "a message of kind ", name_of(message.kind), " is no request");
  const Timeout limit = options.timeout.value_or(default_timeout());
  CHORALE_CHECK(limit.count() >= 0, "[rpc] the time for an answer cannot be negative; 0 means for ever");
  uint64_t id = 0;
  {
    std::unique_lock lock(mutex_);
    if (const auto gone = gone_.find(to); gone != gone_.end()) {
      const std::string reason = gone->second;
      lock.unlock();
      return answered({}, error_of(RpcErrorKind::kConnection, to, reason));
    }
    id = next_request_++;
    const auto end = limit.count() == 0 ? Deadline::Clock::time_point::max() : Deadline::Clock::now() + limit;
    pending_.emplace(id, Pending{to, end, limit, options.future, std::move(answered), std::move(options.late),
                                 lent_in(message), log_.enter(to, message)});
    if (limit.count() > 0) timer_.at(end, id, [this, id] { time_out(id); });
  }
  message.id = id;
  message.chain = Crew::current_chain();
  if (message.chain == 0) message.chain = static_cast<uint64_t>(own_) << 48 | id;
  if (!options_.faults.empty() && fails_on_purpose(to, message))
    return fail(id, error_of(RpcErrorKind::kInjected, own_,
                             concat("[rpc] a message of kind '", name_of(message.kind), "' to worker ", to,
                                    " failed on purpose")));
  send_when_due(std::move(message), [this, to, id](Message due) { send(to, std::move(due), id); });
}

void Core::send_when_due(Message message, const std::function<void(Message)>& send) {
  const auto delay = options_.faults.empty() ? 0ns : delay_of(message.kind);
  if (delay == 0ns) return send(std::move(message));
  ++delayed_;
  timer_.at(Deadline::Clock::now() + delay, [this, send, shared = std::make_shared<Message>(std::move(message))] {
    crew_->run([this, send, shared] {
      send(std::move(*shared));
      --delayed_;
      note_change();
    });
  });
}

std::chrono::nanoseconds Core::delay_of(MessageKind kind) {
  const Faults& faults = options_.faults;
  const auto found = faults.delay.find(kind);
  if (found != faults.delay.end()) return found->second;
  return faults.most_delay == 0ns ? 0ns
                                  : std::chrono::nanoseconds(draw() % static_cast<uint64_t>(faults.most_delay.count()));
}

// A number that follows from the seed of the faults, this worker and how many were drawn.
uint64_t Core::draw() {
  uint64_t x =
      options_.faults.seed + 0x9e3779b97f4a7c15 * (drawn_.fetch_add(1) * 256 + static_cast<uint64_t>(own_) + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

bool Core::fails_on_purpose(int to, const Message& message) {
  if (!options_.faults.fail.contains(message.kind)) return false;
  std::string key = concat(to, " ", name_of(message.kind), " ");
  key.append(reinterpret_cast<const char*>(message.payload.data()), message.payload.size());
  const std::lock_guard lock(mutex_);
  return failed_sends_[key]++ < options_.faults.times && (options_.faults.seed == 0 || draw() % 2 == 0);
}

void Core::send(int to, Message message, uint64_t id) {
  const Faults& faults = options_.faults;
  const bool twice = faults.repeat.contains(message.kind) && (faults.seed == 0 || draw() % 2 == 0);
  try {
    if (twice) deliver(to, message);
    deliver(to, std::move(message));
  } catch (const std::exception&) {
    fail(id, std::current_exception());
  }
}

// The short way: the same bytes, and no history.
void Core::stay_here(Message& message) {
  for (Tensor& x : message.tensors) {
    const Tensor& had = dist_autograd::differentiable(x);
    const Tensor bytes = had.alias();
    if (requires_grad(had)) set_requires_grad(bytes);
    x = x.is_sparse() ? Tensor::sparse_coo(x.sparse().indices, bytes, x.sizes(), x.sparse().coalesced) : bytes;
  }
}

void Core::record(Message& message, int to, bool forced) {
  const dist_autograd::Mark mark = contexts_.sending(message.tensors, to, forced);
  message.context = mark.context;
  message.hop = mark.hop;
}

void Core::deliver(int to, Message message) {
  if (to != own_) return post_.send(to, message);
  stay_here(message);
  Job job = sort({own_, std::move(message), {}});
  if (!job.task) return;
  if (job.is_short) {
    job.task();
  } else {
    crew_->run(std::move(job.task), job.chain);
  }
}

void Core::fail(uint64_t id, const std::exception_ptr& error) {
  Pending pending;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(id);
    if (found == pending_.end()) return;
    pending = std::move(found->second);
    pending_.erase(found);
    if (pending.limit.count() > 0) timer_.take_back(pending.end, id);
  }
  log_.leave(pending.logged, nullptr);
  pending.answered({}, error);
  note_change();
}

void Core::time_out(uint64_t id) {
  Pending pending;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(id);
    if (found == pending_.end()) return;
    pending = std::move(found->second);
    pending_.erase(found);
    if (pending.late) late_.emplace(id, pending.late);
  }
  log_.leave(pending.logged, nullptr);
  // The caller may write them from now on, and the other worker may still read them.
  for (const auto& storage : pending.lent) comm::take_back(*storage);
  const auto error =
      error_of(RpcErrorKind::kTimeout, pending.to,
               concat("[rpc] worker '", workers_[static_cast<size_t>(pending.to)].name, "' did not answer within ",
                      std::chrono::duration<double, std::milli>(pending.limit).count(), " ms"));
  if (!pending.future || !pending.future->has_callbacks()) {
    pending.answered({}, error);
    return note_change();
  }
  // Whatever follows from it may take long: not on the timer's thread.
  crew_->run([this, answered = std::move(pending.answered), error] {
    answered({}, error);
    note_change();
  });
}

void Core::fail_all(int worker, const std::string& reason) {
  std::vector<Pending> failed;
  {
    const std::lock_guard lock(mutex_);
    for (auto at = pending_.begin(); at != pending_.end();) {
      if (worker >= 0 && at->second.to != worker) {
        ++at;
        continue;
      }
      if (at->second.limit.count() > 0) timer_.take_back(at->second.end, at->first);
      failed.push_back(std::move(at->second));
      at = pending_.erase(at);
    }
  }
  for (const Pending& pending : failed) log_.leave(pending.logged, nullptr);
  for (Pending& pending : failed) pending.answered({}, error_of(RpcErrorKind::kConnection, pending.to, reason));
  note_change();
}

void Core::send_control(int to, Message message, std::function<void(const std::exception_ptr&)> done) {
  struct Attempt {
    Message message;
    std::function<void(const std::exception_ptr&)> done;
    int retries = 0;
    std::function<void()> send;
  };
  auto attempt = std::make_shared<Attempt>(Attempt{std::move(message), std::move(done), 0, {}});
  const int most = attempt->message.kind == MessageKind::kCleanup ? kMostCleanupRetries : kMostRetries;
  attempt->send = [this, to, attempt, most] {
    request(to, attempt->message, {.timeout = Timeout(0), .internal = true},
            [this, attempt, most](const Message&, const std::exception_ptr& error) {
              if (error && attempt->retries < most && is_running()) {
                RpcErrorKind kind = RpcErrorKind::kRemote;
                try {
                  std::rethrow_exception(error);
                } catch (const RpcError& known) {
                  kind = known.kind();
                } catch (...) {  // NOLINT(bugprone-empty-catch): of another kind
                }
                if (kind == RpcErrorKind::kInjected) {
                  const double factor = std::pow(1.5, attempt->retries++);
                  const auto wait = std::chrono::duration_cast<std::chrono::nanoseconds>(options_.retry_after * factor);
                  timer_.at(Deadline::Clock::now() + wait, [this, attempt] { crew_->run(attempt->send); });
                  return;
                }
              }
              const auto last = std::move(attempt->done);
              attempt->send = {};
              if (last) last(error);
            });
  };
  attempt->send();
}

void Core::remote(const std::shared_ptr<Reference>& reference, MessageKind kind, std::optional<Timeout> timeout,
                  Writer arguments) {
  const bool own = reference->is_owner();
  const auto user = own ? nullptr : std::static_pointer_cast<UserReference>(reference);
  Writer writer;
  writer.number(reference->id().packed);
  writer.number(own ? reference->id().packed : user->fork().packed);
  writer.raw(arguments.payload.data(), arguments.payload.size());
  Message message{.kind = kind, .payload = std::move(writer.payload), .tensors = std::move(arguments.tensors)};
  record(message, reference->owner(), kind == MessageKind::kRemoteCall);
  request(reference->owner(), std::move(message),
          {.timeout = timeout,
           .late =
               [this, user](const Message&, const std::exception_ptr&) {
                 if (user) references_.created(user);
               }},
          [this, reference, user](const Message&, const std::exception_ptr& error) {
            if (user) {
              if (error) {
                references_.not_created(user, error);
              } else {
                references_.created(user);
              }
              return;
            }
            if (error)
              static_cast<OwnerReference&>(*reference).value.state()->try_set_error(failed_reference(*reference));
            references_.done_with_self(reference->id());
          });
}

bool Core::wait_until(const std::function<bool()>& holds, Deadline deadline) {
  is_awaited_ = true;
  bool held = false;
  while (!(held = holds()) && !deadline.passed()) {
    std::shared_ptr<Future<void>::State> change;
    {
      const std::lock_guard lock(mutex_);
      if (!next_change_ || next_change_->is_complete()) next_change_ = std::make_shared<Future<void>::State>(helper());
      change = next_change_;
    }
    // What has changed just before it was there is seen here.
    if ((held = holds())) break;
    crew_->wait(*change, deadline);
  }
  return held;
}

void Core::note_change() {
  if (!is_awaited_) return;
  std::shared_ptr<Future<void>::State> change;
  {
    const std::lock_guard lock(mutex_);
    change = std::move(next_change_);
  }
  if (change) change->try_set({});
}

std::exception_ptr Core::failed_reference(const Reference& reference) {
  return error_of(RpcErrorKind::kReferenceFailed, reference.owner(),
                  concat("[rref] the value of reference ", reference.id(), " could not be made: the call that was to ",
                         "make it failed or took too long"));
}

// ---- what comes in

Job Core::sort(Arrival arrival) {
  const int from = arrival.from;
  if (!arrival.message) {
    if (from >= 0) {
      const std::string reason = concat("[rpc] worker '", workers_[static_cast<size_t>(from)].name, "' (", from,
                                        ") is gone: ", arrival.reason);
      {
        const std::lock_guard lock(mutex_);
        gone_.emplace(from, reason);
      }
      return {[this, from, reason] {
                fail_all(from, reason + flight_of(from, reason));
                fail_gatherings(from, reason);
                references_.forget_worker(from);
                note_change();
              },
              false};
    }
    return {[this, reason = arrival.reason] { fail_all(-1, concat("[rpc] nothing moves any more: ", reason)); }, false};
  }
  Message& message = *arrival.message;
  if (!is_request(message.kind)) return sort_answer(from, std::move(message));
  served_.fetch_add(1, std::memory_order_relaxed);
  const uint64_t chain = message.chain;
  switch (message.kind) {
    case MessageKind::kUserDelete:
    case MessageKind::kForkRequest:
    case MessageKind::kChildAccept:
    case MessageKind::kCleanup:
    case MessageKind::kGather:
      return {[this, from, shared = std::make_shared<Message>(std::move(message))] { serve(from, std::move(*shared)); },
              true, false, chain};
    default: {
      const bool of_backward = message.kind == MessageKind::kGradient || message.kind == MessageKind::kMark ||
                               message.kind == MessageKind::kSettle || message.kind == MessageKind::kAbort;
      return {[this, from, shared = std::make_shared<Message>(std::move(message))] { serve(from, std::move(*shared)); },
              false, of_backward, chain};
    }
  }
}

// Where the last calls can be read, if some of them were waiting for this worker.
std::string Core::flight_of(int worker, const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (std::none_of(pending_.begin(), pending_.end(), [&](const auto& entry) { return entry.second.to == worker; }))
      return {};
  }
  const std::string path = comm::write_flight(own_, log_.json(own_, workers_, reason) + "\n");
  return path.empty() ? path : concat("; the last calls: ", path);
}

Job Core::sort_answer(int from, Message message) {
  Pending pending;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(message.id);
    if (found == pending_.end()) {
      const auto late = late_.find(message.id);
      if (late == late_.end()) return {};
      pending.answered = std::move(late->second);
      late_.erase(late);
    } else {
      if (found->second.to != from) {
        log_warning(concat("[rpc] worker ", from, " answered a call of worker ", found->second.to));
        return {};
      }
      pending = std::move(found->second);
      pending_.erase(found);
      if (pending.limit.count() > 0) timer_.take_back(pending.end, message.id);
    }
  }
  log_.leave(pending.logged, &message);
  const bool is_short = !pending.future || !pending.future->has_callbacks();
  return {[this, from, shared = std::make_shared<Message>(std::move(message)), answered = std::move(pending.answered)] {
            if (shared->kind == MessageKind::kError) {
              answered({}, error_in(*shared));
            } else {
              contexts_.received({shared->context, shared->hop}, from, shared->tensors);
              answered(std::move(*shared), nullptr);
            }
            note_change();
          },
          is_short};
}

std::exception_ptr Core::error_in(const Message& message) const {
  try {
    Reader reader(message.payload, {});
    const auto kind = reader.number<uint8_t>();
    CHORALE_CHECK(kind < kRpcErrorKinds, "[rpc] there is no error of kind ", int{kind});
    const auto worker = reader.number<int32_t>();
    return error_of(static_cast<RpcErrorKind>(kind), worker, read<std::string>(reader));
  } catch (const InvalidArgument&) {
    return std::current_exception();
  }
}

Core::Calls Core::calls() const {
  const std::lock_guard lock(mutex_);
  return {static_cast<int64_t>(pending_.size()), served_.load(), served_later_.load(),
          static_cast<int64_t>(next_request_ - 1)};
}

// ---- the end

void Core::shut_down(bool graceful, Timeout timeout) {
  State running = State::kRuns;
  if (!state_.compare_exchange_strong(running, State::kLeaves)) {
    if (running == State::kStarts) {
      state_ = State::kStopped;
      if (crew_) crew_->stop();
    }
    return;
  }
  std::exception_ptr error;
  if (graceful) {
    try {
      leave_gracefully(timeout);
    } catch (const std::exception&) {
      error = std::current_exception();
    }
  }
  // From here on whatever happened before.
  state_ = State::kStopped;
  {
    RunningAgents& agents = running_agents();
    const std::lock_guard lock(agents.mutex);
    agents.groups.erase(this);
  }
  timer_.stop();
  crew_->stop();
  fail_all(-1, "[rpc] the agent was shut down");
  {
    const std::lock_guard lock(mutex_);
    late_.clear();
    gatherings_.clear();
  }
  const std::string leaks = references_.leaks();
  if (error) std::rethrow_exception(error);
  if (leaks.empty() || !graceful) return;
  const std::string text = concat("[rpc] references of worker ", own_, " are still held at shutdown: ", leaks);
  if (options_.check_leaks) throw RpcError(RpcErrorKind::kReferenceLeak, own_, text);
  log_warning(text);
}

void Core::leave_gracefully(Timeout timeout) {
  std::vector<std::string> names;
  for (const WorkerInfo& worker : workers_) names.push_back(worker.name);
  barrier(names, timeout);
  if (options_.delete_references) references_.delete_all(within(100s));
  // Each call that is served is a call of somebody, so it is enough to count one's own. Calls may begin others between
  // the two counts: only a sum of nothing, after nobody had any, is the end.
  for (bool ends = false; !ends;) {
    wait_until([this] { return own_calls() == 0; }, Deadline::never());
    barrier(names, timeout);
    Writer writer;
    writer.number(own_calls());
    int64_t sum = 0;
    for (const auto& [name, bytes] : all_gather(names, std::move(writer.payload), timeout)) {
      sum += Reader(bytes, {}).number<int64_t>();
    }
    ends = sum == 0;
  }
  // Others may wait for an answer of this worker that is late on purpose.
  wait_until([this] { return delayed_ == 0; }, Deadline::never());
}

int64_t Core::own_calls() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(pending_.size()) - gathers_;
}

}  // namespace chorale::rpc
