#include "chorale/rpc/core.h"

#include <algorithm>
#include <cmath>

#include "chorale/comm/lent_parcels.h"
#include "chorale/comm/objects.h"
#include "chorale/trace/trace.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;

constexpr int kMostRetries = 5, kMostCleanupRetries = 20;

constexpr int kMostWorkers = 1 << 16;
// A receiver that is not stuck takes a large tensor in less.
constexpr auto kReclaimTime = 20ms;

// The storages of a call's large tensors.
std::vector<base::Intrusive<Storage>> lent_in(const Message& message) {
  std::vector<base::Intrusive<Storage>> lent;
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

std::exception_ptr error_of(RpcErrorKind kind, int worker, const std::string& text) {
  return std::make_exception_ptr(RpcError(kind, worker, text));
}

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

void Core::forget_agent() const {
  RunningAgents& agents = running_agents();
  const std::lock_guard lock(agents.mutex);
  agents.groups.erase(this);
}

void Core::check_options(const AgentOptions& options) {
  CHORALE_CHECK(options.timeout.count() >= 0, "[rpc] the time for an answer cannot be negative; 0 means for ever");
  CHORALE_CHECK(options.threads >= 1 && options.most_threads >= options.threads, "[rpc] an agent needs at least one ",
                "thread, and at most most_threads = ", options.most_threads, ", not ", options.threads);
}

std::shared_ptr<Core> Core::start(const comm::Group& group, AgentOptions options) {
  CHORALE_CHECK(group.is_member(), "[rpc] an agent needs a group that this rank is in");
  check_no_other(group);
  check_options(options);
  CHORALE_CHECK(!options.id || *options.id == group.rank(), "[rpc] the agent of rank ", group.rank(),
                " of a group is worker ", group.rank(), ", and cannot be worker ", options.id.value_or(-1));
  // Names travel before they are judged, so that all ranks learn of a bad one.
  std::vector<std::string> names;
  names.reserve(static_cast<size_t>(group.size()));
  for (const comm::Value& name :
       comm::all_gather_object(group, options.name.value_or(concat("worker", group.rank())))) {
    names.push_back(name.as<std::string>());
  }
  Roster().fill(names);
  const WorkerInfo own{names[static_cast<size_t>(group.rank())], group.rank()};
  std::shared_ptr<Core> core(new Core(group.duplicate(), own, std::move(options), 0));
  core->roster_.fill(names);
  core->start_crew(group.global_rank(group.rank()));
  RunningAgents& agents = running_agents();
  const std::lock_guard lock(agents.mutex);
  agents.groups.emplace(core.get(), group.engine());
  return core;
}

std::shared_ptr<Core> Core::join(std::shared_ptr<transport::Store> store, AgentOptions options) {
  check_options(options);
  CHORALE_CHECK(options.id.has_value(),
                "[rpc] a worker that joins a group must say which number it has: AgentOptions::id");
  CHORALE_CHECK(*options.id >= 0 && *options.id < kMostWorkers,
                "[rpc] the number of a worker is at least 0 and less than ", kMostWorkers, ", not ", *options.id);
  const WorkerInfo own{options.name.value_or(concat("worker", *options.id)), *options.id};
  check_name(own);
  auto membership = std::make_unique<Membership>(std::move(store), own, options.timeout);
  transport::MemoryStore alone;
  std::shared_ptr<Core> core(
      new Core(comm::Group::connect(alone, "rpc", 0, 1), own, std::move(options), membership->ticket()));
  trace::set_rank(own.id);  // making the group has changed it
  core->membership_ = std::move(membership);
  core->roster_.add(own, core->membership_->ticket());
  core->start_crew(own.id);
  try {
    core->membership_->join([raw = core.get()](const WorkerInfo& worker, uint64_t ticket, comm::Group pair) {
      // What comes from it is read when it is known here, and it is known when it can be reached.
      const auto link = raw->post_.add_link(worker.id, ticket, std::move(pair));
      {
        const std::lock_guard lock(raw->mutex_);
        raw->gone_.erase(worker.id);
      }
      raw->roster_.add(worker, ticket);
      raw->post_.open(link);
      raw->note_change();
    });
    core->say_hello();
  } catch (const std::exception&) {
    core->shut_down(false, 0ns);
    throw;
  }
  return core;
}

Core::Core(comm::Group group, WorkerInfo own, AgentOptions options, uint64_t ticket)
    : options_(std::move(options)),
      own_(own.id),
      own_info_(std::move(own)),
      timeout_ns_(options_.timeout.count()),
      post_(std::move(group)),
      references_(*this, ticket << kBitsPerTicket),
      contexts_(own_, courier_, options_.backward, ticket << kBitsPerTicket) {
  for (const Served& function : options_.serves) functions_.emplace(function.name() + function.signature(), &function);
}

void Core::start_crew(int rank) {
  crew_ = std::make_unique<Crew>(
      post_, [this](Arrival arrival) { return sort(std::move(arrival)); },
      CrewOptions{options_.threads, options_.most_threads, rank});
  state_ = State::kRuns;
  crew_->start();
}

// Afterwards all workers know this one.
void Core::say_hello() {
  std::vector<Future<void>> greeted;
  for (const WorkerInfo& worker : roster_.all()) {
    if (worker.id == own_) continue;
    greeted.emplace_back(std::make_shared<Future<void>::State>(helper()));
    request(worker.id, {.kind = MessageKind::kHello}, {.internal = true},
            [done = greeted.back()](const Message&, const std::exception_ptr&) {
              done.state()->try_set({});  // one that has gone meanwhile need not know it
            });
  }
  for (const Future<void>& one : greeted) one.wait();
}

bool Core::awaits_worker(int id) {
  if (roster_.contains(id)) return true;
  return membership_ && wait_until([&] { return roster_.contains(id); }, within(5s));
}

Core::~Core() {
  shut_down(false, 0ns);
  // A backward that was under way and its context hold each other.
  for (const WorkerInfo& worker : roster_.all()) contexts_.forget_worker(worker.id);
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
  if (message.context != 0 && !contexts_.asked(message.context, to)) message.context = message.hop = 0;
  uint64_t id = 0;
  {
    std::unique_lock lock(mutex_);
    const auto gone = gone_.find(to);
    if (gone != gone_.end() || !is_running()) {  // after end_waits() nobody would end it
      const auto error = gone != gone_.end()
                             ? error_of(RpcErrorKind::kConnection, to, gone->second)
                             : error_of(RpcErrorKind::kNotRunning, own_, "[rpc] the agent was shut down");
      lock.unlock();
      if (message.context != 0) contexts_.answered(message.context, to, 0);
      return answered({}, error);
    }
    id = next_request_++;
    if (message.kind != MessageKind::kGather) ++calls_begun_;
    const auto end = limit.count() == 0 ? Deadline::Clock::time_point::max() : Deadline::Clock::now() + limit;
    pending_.emplace(id, Pending{to, end, limit, options.future, std::move(answered), std::move(options.late),
                                 lent_in(message), std::move(message.passed), options.reads_late, options.of_backward,
                                 message.context, log_.enter(to, message)});
    if (limit.count() > 0) timer_.at(end, id, [this, id] { time_out(id); });
  }
  message.id = id;
  message.chain = Crew::current_chain();
  if (message.chain == 0) message.chain = static_cast<uint64_t>(own_) << 48 | id;
  if (!options_.faults.empty() && fails_on_purpose(to, message))
    return fail(id, error_of(RpcErrorKind::kInjected, own_,
                             concat("[rpc] a message of kind '", name_of(message.kind), "' to worker ", to,
                                    " failed on purpose")));
  std::vector<base::Intrusive<Storage>> lent;
  if (to != own_ && !CallerWaits::does()) lent = lent_in(message);
  send_when_due(to, std::move(message), [this, to, id](Message due) { send(to, std::move(due), id); });
  // The caller goes on, and may write its tensors.
  for (const auto& storage : lent) comm::reclaim(*storage, within(kReclaimTime));
}

void Core::fail(uint64_t id, const std::exception_ptr& error) {
  Pending pending;
  Late late;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = pending_.find(id); found != pending_.end()) {
      pending = std::move(found->second);
      pending_.erase(found);
      if (pending.limit.count() > 0) timer_.take_back(pending.end, id);
    } else if (const auto over = late_.find(id); over != late_.end()) {
      late = std::move(over->second);  // its time was over before it could be sent
      late_.erase(over);
    }
  }
  if (late.context != 0) contexts_.answered(late.context, late.to, 0);
  if (!pending.answered) return;
  log_.leave(pending.logged, nullptr);
  if (pending.context != 0) contexts_.answered(pending.context, pending.to, 0);
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
    if (pending.reads_late) pending.late = pending.answered;
    if (pending.late || pending.passed || pending.context != 0)
      late_.emplace(id, Late{pending.to, std::move(pending.late), std::move(pending.passed), pending.context});
  }
  log_.leave(pending.logged, nullptr);
  // The caller may write them from now on, and the other worker may still read them.
  for (const auto& storage : pending.lent) comm::take_back(*storage);
  const auto error = error_of(RpcErrorKind::kTimeout, pending.to,
                              concat("[rpc] worker '", roster_.known(pending.to).name, "' did not answer within ",
                                     std::chrono::duration<double, std::milli>(pending.limit).count(), " ms"));
  if (!pending.future || !pending.future->has_callbacks()) {
    pending.answered({}, error);
    return note_change();
  }
  // Whatever follows from it may take long: not on the timer's thread.
  crew_->run(
      [this, answered = std::move(pending.answered), error] {
        answered({}, error);
        note_change();
      },
      0, true);
}

void Core::fail_all(int worker, const std::string& reason) {
  std::vector<Pending> failed;
  std::vector<Late> late;  // let go of outside the lock
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(late_, [&](auto& entry) {
      if (worker >= 0 && entry.second.to != worker) return false;
      late.push_back(std::move(entry.second));
      return true;
    });
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
  for (const Late& one : late) {
    if (one.context != 0) contexts_.answered(one.context, one.to, 0);
  }
  for (const Pending& pending : failed) {
    log_.leave(pending.logged, nullptr);
    if (pending.context != 0) contexts_.answered(pending.context, pending.to, 0);
  }
  for (Pending& pending : failed) pending.answered({}, error_of(RpcErrorKind::kConnection, pending.to, reason));
  note_change();
}

struct Core::Control {
  int to;
  Message message;
  std::function<void(const std::exception_ptr&)> done;
  int most;
  int retries = 0;
};

void Core::send_control(int to, Message message, std::function<void(const std::exception_ptr&)> done) {
  message.number = control_numbers_.next({to, roster_.ticket_of(to)});
  const int most = message.kind == MessageKind::kCleanup ? kMostCleanupRetries : kMostRetries;
  try_control(std::make_shared<Control>(Control{to, std::move(message), std::move(done), most}));
}

void Core::try_control(const std::shared_ptr<Control>& control) {
  request(control->to, control->message, {.timeout = Timeout(0), .internal = true},
          [this, control](const Message&, const std::exception_ptr& error) {
            if (error && control->retries < control->most && is_running()) {
              RpcErrorKind kind = RpcErrorKind::kRemote;
              try {
                std::rethrow_exception(error);
              } catch (const RpcError& known) {
                kind = known.kind();
              } catch (...) {  // NOLINT(bugprone-empty-catch): of another kind
              }
              if (kind == RpcErrorKind::kInjected) {
                const double factor = std::pow(1.5, control->retries++);
                const auto wait = std::chrono::duration_cast<std::chrono::nanoseconds>(options_.retry_after * factor);
                timer_.at(Deadline::Clock::now() + wait,
                          [this, control] { crew_->run([this, control] { try_control(control); }); });
                return;
              }
            }
            if (control->done) control->done(error);
          });
}

void Core::remote(const std::shared_ptr<Reference>& reference, MessageKind kind, std::optional<Timeout> timeout,
                  Writer arguments) {
  const bool own = reference->is_owner();
  const auto user = own ? nullptr : std::static_pointer_cast<UserReference>(reference);
  Writer writer;
  writer.number(reference->id().packed);
  writer.number(own ? reference->id().packed : user->fork().packed);
  writer.raw(arguments.payload.data(), arguments.payload.size());
  Message message{.kind = kind,
                  .payload = std::move(writer.payload),
                  .tensors = std::move(arguments.tensors),
                  .passed = std::move(arguments.passed)};
  record(message, reference->owner(), kind == MessageKind::kRemoteCall);
  request(reference->owner(), std::move(message),
          {.timeout = timeout,
           .late =
               [this, user, id = reference->id()](const Message&, const std::exception_ptr&) {
                 if (user) {
                   references_.created(user);
                 } else {
                   references_.done_with_self(id);  // which the late call has begun anew
                 }
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
            auto& owner = static_cast<OwnerReference&>(*reference);
            if (error) {
              owner.value.state()->try_set_error(std::make_exception_ptr(failed_reference(*reference, "rref")));
              owner.own_call->state()->try_set_error(error);
            } else {
              owner.own_call->state()->try_set({});
            }
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

Core::Calls Core::calls() const {
  const std::lock_guard lock(mutex_);
  return {static_cast<int64_t>(pending_.size()), served_.load(), served_later_.load(),
          static_cast<int64_t>(next_request_ - 1)};
}

}  // namespace chorale::rpc
