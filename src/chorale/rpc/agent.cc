#include "chorale/rpc/agent.h"

#include "chorale/base/log.h"
#include "chorale/rpc/backend.h"
#include "chorale/rpc/core.h"

namespace chorale::rpc {

Agent::Agent(const comm::Group& group, AgentOptions options) : core_(start_agent(group, std::move(options))) {}

Agent::Agent(comm::World& world, AgentOptions options) {
  auto use = std::make_unique<StaticUse>(world.store());
  core_ = start_agent(world.group(), std::move(options));
  core_->hold(std::move(use));
}

Agent::Agent(std::shared_ptr<transport::Store> store, AgentOptions options)
    : core_(Core::join(std::move(store), std::move(options))) {}

Agent::~Agent() {
  if (!owns_ || !core_->is_running()) return;
  try {
    core_->shut_down(std::uncaught_exceptions() == 0, Timeout(0));
  } catch (const std::exception& error) {
    log_warning(error.what());
  }
}

namespace {
constinit thread_local int waits_at_once = 0;
}
CallerWaits::CallerWaits() { ++waits_at_once; }
CallerWaits::~CallerWaits() { --waits_at_once; }
bool CallerWaits::does() { return waits_at_once > 0; }

Agent here() {
  const auto* serving = Serving::current();
  CHORALE_CHECK_STATE(serving, "[rpc] here() is known inside a function that an agent serves only");
  return Agent(serving->core.shared_from_this());
}
Agent agent_of(Core& core) { return Agent(core.shared_from_this()); }
WorkerInfo caller() {
  const auto* serving = Serving::current();
  CHORALE_CHECK_STATE(serving, "[rpc] caller() is known inside a function that an agent serves only");
  return serving->core.roster().known(serving->from);
}

const WorkerInfo& Agent::info() const { return core_->own_info(); }
WorkerInfo Agent::info(const To& worker) const { return core_->roster().find(worker); }
std::vector<WorkerInfo> Agent::workers() const { return core_->roster().all(); }
bool Agent::is_running() const { return core_->is_running(); }
std::shared_ptr<Helper> Agent::helper() const { return core_->helper(); }
Agent::operator dist_autograd::Contexts&() const { return core_->contexts(); }
Timeout Agent::timeout() const { return core_->default_timeout(); }
void Agent::set_timeout(Timeout timeout) { core_->set_default_timeout(timeout); }
void Agent::shutdown(Timeout timeout) { core_->shut_down(true, timeout); }
void Agent::shutdown_now() { core_->shut_down(false, Timeout(0)); }

AgentInfo Agent::debug() const {
  const Crew::Counts crew = core_->crew().counts();
  const Core::Calls calls = core_->calls();
  return {.threads_configured = core_->options().threads,
          .threads = crew.threads,
          .threads_idle = crew.idle,
          .threads_waiting = crew.waiting,
          .queued = static_cast<int64_t>(crew.queued),
          .own_calls = calls.own,
          .served_calls = calls.served,
          .served_later = calls.served_later,
          .requests = calls.started,
          .references = core_->references().counts(),
          .calls = core_->log().figures()};
}

Agent::Numbers Agent::crew_info() const {
  const AgentInfo info = debug();
  return {{"agent.threads_configured", info.threads_configured},
          {"agent.threads", info.threads},
          {"agent.threads_idle", info.threads_idle},
          {"agent.threads_waiting", info.threads_waiting},
          {"agent.queued", info.queued},
          {"agent.own_calls", info.own_calls},
          {"agent.served_calls", info.served_calls},
          {"agent.served_later", info.served_later},
          {"agent.requests", info.requests}};
}
Agent::Numbers Agent::reference_info() const {
  const ReferenceCounts counts = core_->references().counts();
  const auto number = [](size_t count) { return static_cast<int64_t>(count); };
  return {{"references.owners", number(counts.owners)},
          {"references.pending_values", number(counts.pending_values)},
          {"references.pending_users", number(counts.pending_users)},
          {"references.forks", number(counts.forks)},
          {"references.pending_children", number(counts.pending_children)},
          {"references.users", number(counts.users)}};
}
Agent::Numbers Agent::autograd_info() const {
  const dist_autograd::Contexts::Counts counts = core_->contexts().counts();
  return {{"autograd.contexts", static_cast<int64_t>(counts.contexts)},
          {"autograd.backwards", static_cast<int64_t>(counts.backwards)}};
}
Agent::Numbers Agent::debug_info() const {
  Numbers all = crew_info();
  all.merge(reference_info());
  all.merge(autograd_info());
  return all;
}

std::string Agent::flight_record() const { return core_->log().json(core_->own(), workers(), {}); }

// ---- calls

Writer Agent::begin(int to) const {
  if (!is_running()) throw RpcError(RpcErrorKind::kNotRunning, core_->own(), "[rpc] the agent was shut down");
  return Writer(core_.get(), to);
}

void Agent::start(MessageKind kind, int worker, const To& to, Writer writer, FutureState* future,
                  std::function<void(Reader*, const std::exception_ptr&)> take) const {
  Message message{.kind = kind,
                  .payload = std::move(writer.payload),
                  .tensors = std::move(writer.tensors),
                  .passed = std::move(writer.passed)};
  core_->record(message, worker, kind == MessageKind::kCall);
  core_->request(worker, std::move(message), {.timeout = to.timeout(), .future = future, .reads_late = true},
                 [core = core_.get(), worker, take = std::move(take)](Message answer, const std::exception_ptr& error) {
                   if (error) return take(nullptr, error);
                   Reader reader(answer.payload, answer.tensors, core, worker);
                   try {
                     take(&reader, nullptr);
                   } catch (const std::exception&) {
                     take(nullptr, std::current_exception());
                   }
                 });
}

std::shared_ptr<Reference> Agent::make_reference(int owner) const {
  References& references = core_->references();
  if (owner == core_->own()) return references.make_own();
  return references.make_user(owner);
}
std::shared_ptr<Reference> Agent::make_local(AnyValue value) const {
  if (!is_running()) throw RpcError(RpcErrorKind::kNotRunning, core_->own(), "[rpc] the agent was shut down");
  return core_->references().make_local(std::move(value));
}

void Agent::start_remote(const std::shared_ptr<Reference>& reference, MessageKind kind, const To& to,
                         Writer writer) const {
  core_->remote(reference, kind, to.timeout(), std::move(writer));
}
void Agent::give_up(const std::shared_ptr<Reference>& reference) const {
  References& references = core_->references();
  if (reference->is_owner()) return references.done_with_self(reference->id());
  references.not_created(std::static_pointer_cast<UserReference>(reference), std::current_exception());
}

Future<std::vector<Tensor>> Agent::call_op_async(const To& to, const std::string& op, const std::vector<Tensor>& in,
                                                 const Attrs& attributes) {
  const WorkerInfo worker = info(to);
  using Result = Future<std::vector<Tensor>>;
  Result future(std::make_shared<Result::State>(helper()));
  Writer writer = begin(worker.id);
  write_op(writer, op, in, attributes);
  start(MessageKind::kOp, worker.id, to, std::move(writer), future.state().get(),
        [future](Reader* reader, const std::exception_ptr& error) {
          if (error) return (void)future.state()->try_set_error(error);
          future.state()->try_set(read<std::vector<Tensor>>(*reader));
        });
  note_call(future);
  return future;
}

RRef<std::vector<Tensor>> Agent::remote_op(const To& to, const std::string& op, const std::vector<Tensor>& in,
                                           const Attrs& attributes) {
  const WorkerInfo worker = info(to);
  Writer writer = begin(worker.id);
  const std::shared_ptr<Reference> reference = make_reference(worker.id);
  try {
    write_op(writer, op, in, attributes);
    start_remote(reference, MessageKind::kRemoteOp, to, std::move(writer));
  } catch (...) {
    give_up(reference);
    throw;
  }
  return RRef<std::vector<Tensor>>(reference);
}

void Agent::write_op(Writer& writer, const std::string& op, const std::vector<Tensor>& in, const Attrs& attributes) {
  write(writer, op);
  write_attributes(writer, attributes);
  write(writer, in);
}

std::vector<std::shared_ptr<FutureState>>*& Agent::calls_of_thread() {
  constinit thread_local std::vector<std::shared_ptr<FutureState>>* calls = nullptr;
  return calls;
}

void Agent::wait_all(const std::function<void()>& body) {
  std::vector<std::shared_ptr<FutureState>> calls;
  {
    struct Scope {
      std::vector<std::shared_ptr<FutureState>>* before;
      ~Scope() { calls_of_thread() = before; }
    } const scope{std::exchange(calls_of_thread(), &calls)};
    body();
  }
  Future<void> all(std::make_shared<Future<void>::State>(helper()));
  if (calls.empty()) return;
  auto left = std::make_shared<std::atomic<size_t>>(calls.size());
  for (const auto& call : calls) {
    call->add_callback([all, left, state = call.get()] {
      if (state->error()) {
        all.state()->try_set_error(state->error());
      } else if (left->fetch_sub(1) == 1) {
        all.state()->try_set({});
      }
    });
  }
  all.wait();
}

// ---- together

void Agent::barrier(std::vector<std::string> names, Timeout timeout) {
  if (names.empty()) {
    for (const WorkerInfo& worker : workers()) names.push_back(worker.name);
  }
  core_->barrier(names, timeout);
}

std::map<std::string, Bytes> Agent::gather(Bytes own, Timeout timeout) const {
  std::vector<std::string> names;
  for (const WorkerInfo& worker : workers()) names.push_back(worker.name);
  return core_->all_gather(names, std::move(own), timeout);
}

}  // namespace chorale::rpc
