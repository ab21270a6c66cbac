// Calls of functions on other workers.
//
//   Tensor embed(const Tensor& ids) { … }
//   rpc::Agent agent(group, {.name = "trainer0", .serves = {rpc::remote<embed>}});
//   Tensor y = agent.call<embed>("server", ids);               // waits for the result
//   Future<Tensor> f = agent.call_async<embed>("server", ids);  // does not
//   RRef<Tensor> r = agent.remote<embed>("server", ids);        // the result stays there
//   agent.shutdown();
//
// Every rank of a group makes an agent, and serves the others until it is shut down; or workers join and leave one by
// one, meeting at a store. Calls may be made by any thread,
// also inside functions that are served. There is no order between two calls, not even of one thread.
//
// Tensors that are passed may be written as soon as the call has returned, call_async() and remote() too: large ones
// are read where they are by the worker that is called, which is waited for, or they get fresh pages (Note [Messages on
// the wire]). What a function gets is its own, except in a call of the own worker, which passes the same tensors.
//
// Errors are RpcErrors that say of what kind they are and on which worker they arose. A worker that ends fails all
// calls that wait for it.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chorale/comm/world.h"
#include "chorale/rpc/agent_options.h"
#include "chorale/rpc/call_log.h"
#include "chorale/rpc/rref.h"

namespace chorale::rpc {

// What an agent is doing, for people and tests.
struct AgentInfo {
  int threads_configured = 0, threads = 0, threads_idle = 0, threads_waiting = 0;
  int64_t queued = 0, own_calls = 0, served_calls = 0, served_later = 0;
  int64_t requests = 0;  // that this worker has sent so far, calls and others
  ReferenceCounts references{};
  std::vector<CallFigures> calls{};  // of this worker, by the worker that was called
};

class Agent {
 public:
  // Collective over the group, which the agent does not need afterwards: it makes one of its own.
  explicit Agent(const comm::Group& group, AgentOptions options = {});
  // The same over the world's default group. The world must live longer.
  explicit Agent(comm::World& world, AgentOptions options = {});
  // Joins the workers that meet at the store one by one, and may leave them again while they work: a group that changes
  // (Note [Groups that change] in rpc/membership.h). The options say which number and name this worker has. Returns
  // when it and all that are there know each other.
  Agent(std::shared_ptr<transport::Store> store, AgentOptions options);
  // Shuts down gracefully if that was not done; immediately when an exception is passing through.
  ~Agent();
  // A copy stands for the same agent, and does not shut it down when it goes; callbacks may keep one.
  Agent(const Agent& other) : core_(other.core_), owns_(false) {}
  Agent& operator=(const Agent&) = delete;

  // ---- the workers that are there
  const WorkerInfo& info() const;
  // RpcError (kUnknownWorker) for one that is not there.
  WorkerInfo info(const To& worker) const;
  std::vector<WorkerInfo> workers() const;
  bool is_running() const;

  // ---- calls
  template <auto F, class... Args>
  auto call_async(const To& to, const Args&... args) -> Future<typename detail::FunctionTraits<decltype(F)>::Result> {
    using Traits = detail::FunctionTraits<decltype(F)>;
    using Result = typename Traits::Result;
    static_assert(Sendable<typename Traits::Stored>, "this result cannot travel; call the function with remote()");
    const WorkerInfo worker = info(to);
    Future<Result> future(std::make_shared<typename Future<Result>::State>(helper()));
    Writer writer = begin(worker.id);
    write_arguments<F>(writer, args...);
    start(MessageKind::kCall, worker.id, to, std::move(writer), future.state().get(),
          [future](Reader* reader, const std::exception_ptr& error) {
            if (error) return (void)future.state()->try_set_error(error);
            future.state()->try_set(read<typename Traits::Stored>(*reader));
          });
    note_call(future);
    return future;
  }
  template <auto F, class... Args>
  auto call(const To& to, const Args&... args) {
    const auto future = [&] {
      const CallerWaits waits;
      return call_async<F>(to, args...);
    }();
    return future.wait();
  }
  // The result stays with the worker that computes it. Returns at once; whether the function threw, to_here() says.
  template <auto F, class... Args>
  auto remote(const To& to, const Args&... args) -> RRef<typename detail::FunctionTraits<decltype(F)>::Stored> {
    const WorkerInfo worker = info(to);
    Writer writer = begin(worker.id);
    // The number of the reference comes before those of references among the arguments.
    const std::shared_ptr<Reference> reference = make_reference(worker.id);
    try {
      write_arguments<F>(writer, args...);
      start_remote(reference, MessageKind::kRemoteCall, to, std::move(writer));
    } catch (...) {
      give_up(reference);
      throw;
    }
    return RRef<typename detail::FunctionTraits<decltype(F)>::Stored>(reference);
  }
  // Methods of the object behind a reference, on its owner.
  template <auto F, class T, class... Args>
  auto call_async(const RRef<T>& object, const Args&... args) {
    return call_async<F>(To(object.owner()), object, args...);
  }
  template <auto F, class T, class... Args>
  auto call(const RRef<T>& object, const Args&... args) {
    return call_async<F>(To(object.owner()), object, args...).wait();
  }
  template <auto F, class T, class... Args>
  auto remote(const RRef<T>& object, const Args&... args) {
    return remote<F>(To(object.owner()), object, args...);
  }
  // An op of the table, by its name.
  Future<std::vector<Tensor>> call_op_async(const To& to, const std::string& op, const std::vector<Tensor>& in,
                                            const Attrs& attributes = {});
  Tensor call_op(const To& to, const std::string& op, const std::vector<Tensor>& in, const Attrs& attributes = {}) {
    return call_op_async(to, op, in, attributes).wait().at(0);
  }
  RRef<std::vector<Tensor>> remote_op(const To& to, const std::string& op, const std::vector<Tensor>& in,
                                      const Attrs& attributes = {});
  // A reference to a value of this worker.
  template <class T>
  RRef<T> reference(T value) {
    return RRef<T>(make_local(any_value(std::move(value))));
  }
  // Runs `body` and waits for all calls that this thread has started in it, with call_async; throws the first error
  // without waiting for the rest.
  void wait_all(const std::function<void()>& body);

  // ---- all workers, or some, together; each of those that are named calls it
  void barrier(std::vector<std::string> names = {}, Timeout timeout = Timeout(0));
  template <Sendable T>
  std::map<std::string, T> all_gather(const T& value, Timeout timeout = Timeout(0)) {
    Writer writer;
    write(writer, value);
    CHORALE_CHECK(writer.tensors.empty(), "[rpc] tensors cannot be gathered; call a function that returns them");
    std::map<std::string, T> values;
    for (const auto& [name, bytes] : gather(std::move(writer.payload), timeout)) {
      Reader reader(bytes, {});
      values.emplace(name, read<T>(reader));
    }
    return values;
  }

  // ---- settings and numbers
  Timeout timeout() const;
  // Sets the timeout of later calls.
  void set_timeout(Timeout timeout);
  AgentInfo debug() const;
  // The same as numbers with names: of the agent itself, of references, of distributed autograd; and all of them.
  using Numbers = std::map<std::string, int64_t>;
  Numbers crew_info() const;
  Numbers reference_info() const;
  Numbers autograd_info() const;
  Numbers debug_info() const;
  // The last 1,000 calls of this worker as JSON text.
  std::string flight_record() const;

  // ---- the end
  // Waits until all workers are here and no call is in flight anywhere, serving meanwhile; then deletes what references
  // are left. In a group that changes the agent waits for its own calls only, and tells the others that it leaves.
  // Whatever fails, the agent is shut down afterwards. 0: waits for ever.
  void shutdown(Timeout timeout = Timeout(0));
  // Waits for nobody.
  void shutdown_now();

  const std::shared_ptr<Core>& core() const { return core_; }
  // dist_autograd::Context context(agent);
  operator dist_autograd::Contexts&() const;  // NOLINT(google-explicit-constructor)

 private:
  std::shared_ptr<Helper> helper() const;
  Writer begin(int to) const;
  std::shared_ptr<Reference> make_reference(int owner) const;
  std::shared_ptr<Reference> make_local(AnyValue value) const;
  void start(MessageKind kind, int worker, const To& to, Writer writer, FutureState* future,
             std::function<void(Reader*, const std::exception_ptr&)> take) const;
  void start_remote(const std::shared_ptr<Reference>& reference, MessageKind kind, const To& to, Writer writer) const;
  // Nobody will be asked for its value. While an exception is handled.
  void give_up(const std::shared_ptr<Reference>& reference) const;
  std::map<std::string, Bytes> gather(Bytes own, Timeout timeout) const;
  template <class T>
  static void note_call(const Future<T>& future) {
    if (auto* calls = calls_of_thread()) calls->push_back(future.state());
  }
  static std::vector<std::shared_ptr<FutureState>>*& calls_of_thread();
  static void write_op(Writer& writer, const std::string& op, const std::vector<Tensor>& in, const Attrs& attributes);

  template <auto F, class... Args>
  static void write_arguments(Writer& writer, const Args&... args) {
    using Arguments = typename detail::FunctionTraits<decltype(F)>::Arguments;
    static_assert(sizeof...(Args) == std::tuple_size_v<Arguments>, "the function takes another number of arguments");
    static const std::string name = detail::function_name<F>(), signature = detail::signature_of<decltype(F)>();
    write(writer, name);
    write(writer, signature);
    [&]<size_t... I>(std::index_sequence<I...>) {
      (write_argument<std::tuple_element_t<I, Arguments>>(writer, args), ...);
    }
    (std::index_sequence_for<Args...>());
  }
  template <class T, class Arg>
  static void write_argument(Writer& writer, const Arg& arg) {
    if constexpr (std::is_same_v<T, Arg>) {
      write<T>(writer, arg);
    } else {
      write<T>(writer, static_cast<T>(arg));
    }
  }

  friend Agent here();
  friend Agent agent_of(Core& core);
  explicit Agent(std::shared_ptr<Core> core) : core_(std::move(core)), owns_(false) {}

  std::shared_ptr<Core> core_;
  const bool owns_ = true;
};

// Inside a served function: the agent that runs it, and the worker that called it. StateError elsewhere.
Agent here();
WorkerInfo caller();
Agent agent_of(Core& core);

}  // namespace chorale::rpc
