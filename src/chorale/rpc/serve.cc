// What an agent does with the requests of others.
#include <algorithm>

#include "chorale/autograd/autograd.h"
#include "chorale/base/log.h"
#include "chorale/op/builder.h"
#include "chorale/op/table.h"
#include "chorale/rpc/core.h"
#include "chorale/trace/trace.h"

namespace chorale::rpc {

namespace {
constinit thread_local Serving* serves = nullptr;
}

Serving::Serving(Core& whose, int caller) : core(whose), from(caller), before(serves) { serves = this; }
Serving::~Serving() { serves = before; }
const Serving* Serving::current() { return serves; }

void write_error(Writer& writer, int own, const std::string& own_name, const std::exception_ptr& error) {
  RpcErrorKind kind = RpcErrorKind::kRemote;
  int worker = own;
  std::string text;
  try {
    std::rethrow_exception(error);
  } catch (const RpcError& known) {
    kind = known.kind();
    if (known.worker() >= 0) worker = known.worker();
    text = known.what();
  } catch (const std::exception& other) {
    text = concat("[rpc] worker '", own_name, "' threw ", readable_name(typeid(other)), ": ", other.what());
  } catch (...) {
    text = concat("[rpc] worker '", own_name, "' threw something that is no std::exception");
  }
  writer.number(static_cast<uint8_t>(kind));
  writer.number<int32_t>(worker);
  write(writer, text);
}

void Core::answer(int to, uint64_t id, Message message) {
  served_.fetch_sub(1, std::memory_order_relaxed);
  if (trace::enabled()) [[unlikely]]
    trace_counts();
  message.id = id;
  send_when_due(to, std::move(message), [this, to, id](Message due) { answer_now(to, id, std::move(due)); });
}

void Core::answer_now(int to, uint64_t id, Message message) {
  try {
    if (to != own_) {
      post_.send(to, message);
      if (message.passed) message.passed->take_all();
      return;
    }
    stay_here(message);
    Job job = sort_answer(own_, std::move(message));
    if (job.task) job.task();
  } catch (const RpcError& error) {
    // The worker that asked is gone.
    if (is_running()) log_info(concat("[rpc] an answer to worker ", to, " was not sent: ", error.what()));
  } catch (const InvalidArgument&) {
    served_.fetch_add(1, std::memory_order_relaxed);
    answer_error(to, id, std::current_exception());
  }
}

void Core::answer_error(int to, uint64_t id, const std::exception_ptr& error) {
  Writer writer;
  write_error(writer, own_, own_info_.name, error);
  answer(to, id, {.kind = MessageKind::kError, .payload = std::move(writer.payload)});
}

void Core::answer_refusal(int to, uint64_t id, size_t taken, const std::exception_ptr& error) {
  Writer writer;
  writer.number<uint64_t>(taken);
  if (error) write_error(writer, own_, own_info_.name, error);
  answer(to, id, {.kind = MessageKind::kRefused, .payload = std::move(writer.payload)});
}

void Core::answer_value(int to, const Asked& request, AnyValue value, const std::exception_ptr& error) {
  if (error) return answer_error(to, request.id, error);
  try {
    Writer writer(this, to);
    value.type->write(writer, value.object.get());
    value.object.reset();  // what only the message has need not be copied
    Message message{.kind = MessageKind::kReturn,
                    .payload = std::move(writer.payload),
                    .tensors = std::move(writer.tensors),
                    .passed = std::move(writer.passed)};
    // It may be another thread than the one that ran the function.
    const dist_autograd::Scope scope(contexts_, request.context);
    record(message, to, false);
    message.report = contexts_.report(request.context, to);
    answer(to, request.id, std::move(message));
  } catch (const std::exception&) {
    answer_error(to, request.id, std::current_exception());
  }
}

void Core::serve(int from, Message request) {
  if (!is_control(request.kind)) return serve_once(from, std::move(request));
  using Heard = ControlNumbers::Heard;
  const ControlNumbers::Worker worker{from, roster_.ticket_of(from)};
  const uint64_t number = request.number, id = request.id;
  const Heard heard = control_numbers_.hear(worker, number, id);
  if (heard == Heard::kDone) answer(from, id, {.kind = MessageKind::kReturn});
  if (heard != Heard::kFirst) return;
  serve_once(from, std::move(request));
  for (const uint64_t again : control_numbers_.done(worker, number))
    answer(from, again, {.kind = MessageKind::kReturn});
}

void Core::serve_once(int from, Message request) {
  const uint64_t id = request.id;
  const MessageKind kind = request.kind;
  try {
    switch (request.kind) {
      case MessageKind::kCall:
      case MessageKind::kRemoteCall:
      case MessageKind::kOp:
      case MessageKind::kRemoteOp:
        return serve_call(from, std::move(request));
      case MessageKind::kFetch:
        return serve_fetch(from, request);
      case MessageKind::kType:
        return serve_type(from, request);
      case MessageKind::kRefBackward:
        return serve_ref_backward(from, request);
      case MessageKind::kGather:
        return serve_gather(from, request);
      case MessageKind::kGradient:
      case MessageKind::kMark:
      case MessageKind::kSettle:
      case MessageKind::kAbort:
      case MessageKind::kCleanup:
        return courier_.serve(from, std::move(request));
      default:
        return serve_control(from, request);
    }
  } catch (const std::exception&) {
    if (is_call(kind)) return answer_refusal(from, id, 0, std::current_exception());
    answer_error(from, id, std::current_exception());
  }
}

const Served& Core::find_function(const std::string& name, const std::string& signature) const {
  const auto exact = functions_.find(name + signature);
  if (exact != functions_.end()) return *exact->second;
  const auto found = std::find_if(functions_.begin(), functions_.end(),
                                  [&](const auto& entry) { return entry.second->name() == name; });
  if (found == functions_.end()) {
    std::string known;
    for (const auto& [served, function] : functions_) known += concat(known.empty() ? "" : ", ", served);
    throw RpcError(RpcErrorKind::kUnknownFunction, own_,
                   concat("[rpc] worker '", own_info_.name, "' does not serve ", name, "; it serves ",
                          known.empty() ? "nothing" : known));
  }
  throw RpcError(RpcErrorKind::kWrongArguments, own_,
                 concat("[rpc] worker '", own_info_.name, "' serves ", name, found->second->signature(),
                        ", and was asked for ", name, signature));
}

namespace {

// Runs `then` when all gates are open; it gets the first error.
void after(const std::vector<std::shared_ptr<FutureState>>& gates,
           const std::function<void(const std::exception_ptr&)>& then, Crew& crew, uint64_t chain) {
  if (std::all_of(gates.begin(), gates.end(), [](const auto& gate) { return gate->is_complete() && !gate->error(); }))
    return then(nullptr);
  auto left = std::make_shared<std::atomic<size_t>>(gates.size());
  for (const auto& gate : gates) {
    gate->add_callback([left, gates, then, &crew, chain] {
      if (left->fetch_sub(1) > 1) return;
      std::exception_ptr error;
      for (const auto& each : gates) {
        if (each->error() && !error) error = each->error();
      }
      crew.run([then, error] { then(error); }, chain);
    });
  }
}

}  // namespace

void Core::serve_call(int from, Message request) {
  contexts_.received({request.context, request.hop}, from, request.tensors, dist_autograd::Contexts::Came::kRequest);
  const dist_autograd::Scope scope(contexts_, request.context);
  Reader reader(request.payload, request.tensors, this, from);
  std::shared_ptr<OwnerReference> kept;
  if (request.kind == MessageKind::kRemoteCall || request.kind == MessageKind::kRemoteOp) {
    const GlobalId id{reader.number<uint64_t>()}, fork{reader.number<uint64_t>()};
    CHORALE_CHECK(id.worker() == from, "[rpc] worker ", from, " asks for reference ", id);
    kept = references_.get_or_create(id);
    kept->asked_for = true;
    references_.add_fork(id, fork, from);
  }
  // The error of a remote call is kept, too.
  const Asked head{.id = request.id, .context = request.context};
  const auto reply = [this, from, kept, head](AnyValue value, const std::exception_ptr& error) {
    if (error) log_thrown(from, error);
    if (!kept) return answer_value(from, head, std::move(value), error);
    if (error) {
      kept->value.state()->try_set_error(at_home(error));
    } else {
      kept->value.state()->try_set(std::move(value));
    }
    answer(from, head.id, {.kind = MessageKind::kReturn, .report = contexts_.report(head.context, from)});
  };
  std::function<void(const Reply&)> run;
  try {
    const bool is_op = request.kind == MessageKind::kOp || request.kind == MessageKind::kRemoteOp;
    run = is_op ? prepare_op(reader) : prepare_function(reader);
  } catch (const std::exception&) {
    if (!kept) return answer_refusal(from, request.id, reader.references(), std::current_exception());
    kept->value.state()->try_set_error(at_home(std::current_exception()));
    return answer_refusal(from, request.id, reader.references(), nullptr);
  }
  after(
      reader.gates(),
      [this, from, reply, run, context = request.context](const std::exception_ptr& error) {
        if (error) return reply({}, error);
        const dist_autograd::Scope inside(contexts_, context);
        const Serving serving(*this, from);
        const trace::Span span("rpc:serve");
        try {
          run(reply);
        } catch (...) {
          reply({}, std::current_exception());
        }
      },
      *crew_, request.chain);
}

// Logs what a function threw for the person who looks at this worker. What another worker threw is in the log of that
// one.
void Core::log_thrown(int caller, const std::exception_ptr& error) const {
  try {
    std::rethrow_exception(at_home(error));
  } catch (const RpcError& thrown) {
    if (thrown.kind() == RpcErrorKind::kRemote && thrown.worker() == own_)
      log_warning(concat("[rpc] a call of worker '", roster_.known(caller).name, "' failed: ", thrown.what()));
  }
}

// An error that is kept here and thrown here or elsewhere, later: it says where it arose.
std::exception_ptr Core::at_home(const std::exception_ptr& error) const {
  Writer writer;
  write_error(writer, own_, own_info_.name, error);
  return error_in(Reader(writer.payload, {}));
}

namespace {

// Callers of ops are compiled against them; a worker that sends a name is not.
void check_count(const op::OpDef& row, size_t count) {
  const std::string_view inputs = row.inputs;
  const auto names = inputs.empty() ? 0 : 1 + std::count(inputs.begin(), inputs.end(), ',');
  const bool any = inputs.ends_with("...");
  CHORALE_CHECK(any ? count + 1 >= static_cast<size_t>(names) : count == static_cast<size_t>(names), "[rpc] op '",
                row.name, "' takes (", inputs, "), not ", count, " tensors");
}

}  // namespace

std::function<void(const Reply&)> Core::prepare_op(Reader& reader) const {
  const auto name = read<std::string>(reader);
  const op::OpDef* row = op::find_op(name);
  if (!row)
    throw RpcError(RpcErrorKind::kUnknownFunction, own_, concat("[rpc] there is no op '", name, "' in the table"));
  const Attrs attributes = row->attrs ? read_attributes(reader, row->attrs()) : Attrs();
  if (!row->attrs) CHORALE_CHECK(reader.number<uint64_t>() == 0, "[rpc] op '", name, "' has no attributes");
  auto in = read<std::vector<Tensor>>(reader);
  reader.finish();
  check_count(*row, in.size());
  return [row, attributes, in = std::move(in)](const Reply& reply) {
    std::vector<Tensor> out(static_cast<size_t>(row->outputs));
    op::current().call(*row, in, attributes, out);
    reply(any_value(std::move(out)), nullptr);
  };
}

std::function<void(const Reply&)> Core::prepare_function(Reader& reader) const {
  const auto name = read<std::string>(reader);
  return find_function(name, read<std::string>(reader)).prepare(reader);
}

void Core::serve_fetch(int from, const Message& request) {
  Reader reader(request.payload, {});
  const GlobalId id{reader.number<uint64_t>()};
  const auto expected = read<std::string>(reader);
  // If the call that makes it has not come yet, it will.
  const std::shared_ptr<OwnerReference> owner = references_.get_or_create(id);
  contexts_.received({request.context, request.hop}, from, {}, dist_autograd::Contexts::Came::kRequest);
  served_later_.fetch_add(1, std::memory_order_relaxed);
  const auto reply = [this, from, owner, expected, head = Asked{.id = request.id, .context = request.context}] {
    served_later_.fetch_sub(1, std::memory_order_relaxed);
    const auto& state = *owner->value.state();
    if (state.error()) return answer_error(from, head.id, state.error());
    if (state.value().type->name != expected)
      return answer_error(
          from, head.id,
          std::make_exception_ptr(RpcError(RpcErrorKind::kWrongArguments, own_,
                                           concat("[rpc] reference ", owner->id(), " stands for a ",
                                                  state.value().type->name, ", not for a ", expected))));
    answer_value(from, head, state.value(), nullptr);
  };
  owner->value.state()->add_callback(reply);
}

void Core::serve_type(int from, const Message& request) {
  Reader reader(request.payload, {});
  const std::shared_ptr<OwnerReference> owner = references_.get_or_create({reader.number<uint64_t>()});
  served_later_.fetch_add(1, std::memory_order_relaxed);
  owner->value.state()->add_callback([this, from, owner, id = request.id] {
    served_later_.fetch_sub(1, std::memory_order_relaxed);
    const auto& state = *owner->value.state();
    if (state.error()) return answer_error(from, id, state.error());
    Writer writer;
    write(writer, state.value().type->name);
    answer(from, id, {.kind = MessageKind::kReturn, .payload = std::move(writer.payload)});
  });
}

void Core::serve_ref_backward(int from, const Message& request) {
  Reader reader(request.payload, {});
  const std::shared_ptr<OwnerReference> owner = references_.get_or_create({reader.number<uint64_t>()});
  const auto context = reader.number<uint64_t>();
  const bool retain_graph = read<bool>(reader);
  served_later_.fetch_add(1, std::memory_order_relaxed);
  // No thread waits until the value is there.
  owner->value.state()->add_callback([=, this, id = request.id, chain = request.chain] {
    served_later_.fetch_sub(1, std::memory_order_relaxed);
    if (const auto error = owner->value.state()->error()) return answer_error(from, id, error);
    const auto runs = [=, this] {
      try {
        backward_from(*owner, context, retain_graph);
      } catch (const std::exception&) {
        return answer_error(from, id, std::current_exception());
      }
      answer(from, id, {.kind = MessageKind::kReturn});
    };
    crew_->run(runs, chain);
  });
}

void Core::backward_from(const OwnerReference& reference, uint64_t context, bool retain_graph) {
  reference.value.state()->wait();
  const AnyValue value = reference.value.wait();
  if (value.type->type != typeid(Tensor))
    throw RpcError(RpcErrorKind::kWrongArguments, own_,
                   concat("[rref] backward begins at a tensor: reference ", reference.id(), " stands for a ",
                          value.type->name, ", not a tensor"));
  const Tensor& root = *static_cast<const Tensor*>(value.object.get());
  if (context != 0) return contexts_.backward(context, {root}, retain_graph);
  chorale::backward(root, {}, {.retain_graph = retain_graph});
}

void Core::serve_control(int from, const Message& request) {
  Reader reader(request.payload, {});
  switch (request.kind) {
    case MessageKind::kUserDelete: {
      const GlobalId id{reader.number<uint64_t>()}, fork{reader.number<uint64_t>()};
      references_.delete_fork(id, fork);
      break;
    }
    case MessageKind::kForkRequest: {
      const GlobalId id{reader.number<uint64_t>()}, fork{reader.number<uint64_t>()};
      references_.add_fork(id, fork, from);
      break;
    }
    case MessageKind::kHello:
      break;
    case MessageKind::kLeave: {
      answer(from, request.id, {.kind = MessageKind::kReturn});
      const uint64_t ticket = roster_.ticket_of(from);
      const std::string reason =
          concat("[rpc] worker '", roster_.known(from).name, "' (", from, ") has left the group");
      if (membership_ && roster_.remove(from, ticket)) {
        {
          const std::lock_guard lock(mutex_);
          gone_[from] = reason;
        }
        drop_gone(from, ticket, reason);
      }
      return;
    }
    case MessageKind::kChildAccept:
      references_.child_accepted({reader.number<uint64_t>()});
      break;
    default:
      throw InvalidArgument(concat("[rpc] worker ", from, " sent a request of kind '", name_of(request.kind),
                                   "', which nobody here serves"));
  }
  answer(from, request.id, {.kind = MessageKind::kReturn});
}

}  // namespace chorale::rpc
