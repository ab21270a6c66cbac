#include "chorale/rpc/rref.h"

#include "chorale/rpc/core.h"

namespace chorale::rpc {

const Reference& AnyRRef::get() const {
  CHORALE_CHECK_STATE(reference_,
                      "[rref] this reference stands for nothing; agent.remote() and agent.reference() make one");
  return *reference_;
}

WorkerInfo AnyRRef::owner() const { return get().core()->roster().known(get().owner()); }

bool AnyRRef::is_confirmed() const {
  if (is_owner()) return true;
  const FutureState& state = *static_cast<const UserReference&>(get()).confirmed.state();
  return state.is_complete() && !state.error();
}

Future<void> AnyRRef::created() const {
  if (!is_owner()) return static_cast<const UserReference&>(get()).created;
  if (const auto& call = static_cast<const OwnerReference&>(get()).own_call) return *call;
  Future<void> now;
  now.set();
  return now;
}

Future<std::string> AnyRRef::type_async(std::optional<Timeout> timeout) const {
  const bool here = is_owner();
  get().check_usable("type");
  const std::shared_ptr<Core> core = get().core();
  return reference_->type([&] {
    // Kept by the reference, so it must not keep the agent.
    const Future<std::string> future;
    if (here) {
      const auto value = std::static_pointer_cast<OwnerReference>(reference_)->value;
      value.state()->add_callback([future, value] {
        if (const auto error = value.state()->error()) return (void)future.state()->try_set_error(error);
        future.state()->try_set(value.state()->value().type->name);
      });
      return future;
    }
    Writer writer;
    writer.number(id().packed);
    core->request(get().owner(), {.kind = MessageKind::kType, .payload = std::move(writer.payload)},
                  {.timeout = timeout, .future = future.state().get()},
                  [future, own = *this](const Message& answer, const std::exception_ptr& error) {
                    if (error) return (void)future.state()->try_set_error(error);
                    try {
                      Reader reader(answer.payload, {});
                      future.state()->try_set(read<std::string>(reader));
                    } catch (const std::exception&) {
                      future.state()->try_set_error(std::current_exception());
                    }
                  });
    return future;
  });
}

void AnyRRef::fetch(const std::string& type, std::optional<Timeout> timeout,
                    std::function<void(Reader*, const std::exception_ptr&)> take, FutureState* future) const {
  const std::shared_ptr<Core> core = get().core();
  Writer writer;
  writer.number(id().packed);
  write(writer, type);
  const int owner = get().owner();
  Message message{.kind = MessageKind::kFetch, .payload = std::move(writer.payload)};
  core->record(message, owner, true);
  core->request(owner, std::move(message), {.timeout = timeout, .future = future, .reads_late = true},
                [core = core.get(), owner, take = std::move(take)](Message answer, const std::exception_ptr& error) {
                  if (error) return take(nullptr, error);
                  Reader reader(answer.payload, answer.tensors, core, owner);
                  try {
                    take(&reader, nullptr);
                  } catch (const std::exception&) {
                    take(nullptr, std::current_exception());
                  }
                });
}

AnyValue AnyRRef::local(const char* call, const std::type_info& type) const {
  if (!is_owner()) {
    const auto core = get().core();
    throw RpcError(
        RpcErrorKind::kNotOwner, get().owner(),
        concat("[", call, "] reference ", *this, " is owned by worker '", core->roster().known(get().owner()).name,
               "', and this is worker '", core->own_info().name, "'; use to_here()"));
  }
  const auto& owner = static_cast<const OwnerReference&>(get());
  owner.value.state()->wait();
  AnyValue value = owner.value.wait();
  if (value.type->type != type)
    throw RpcError(RpcErrorKind::kWrongArguments, get().owner(),
                   concat("[", call, "] reference ", *this, " stands for a ", value.type->name, ", not for a ",
                          readable_name(type)));
  return value;
}

std::ostream& operator<<(std::ostream& out, const AnyRRef& rref) {
  if (!rref) return out << "RRef(nothing)";
  if (rref.is_owner()) return out << "OwnerRRef" << rref.id();
  return out << "UserRRef" << rref.id() << " fork " << static_cast<const UserReference&>(*rref.reference()).fork();
}

void backward(const AnyRRef& rref, uint64_t context, bool retain_graph) {
  CHORALE_CHECK_STATE(rref, "[rref] this reference stands for nothing");
  const std::shared_ptr<Core> core = rref.reference()->core();
  if (rref.is_owner())
    return core->backward_from(static_cast<OwnerReference&>(*rref.reference()), context, retain_graph);
  CHORALE_CHECK(context != 0, "[rref] backward from a value of another worker needs a context");
  Writer writer;
  writer.number(rref.id().packed);
  writer.number(context);
  write(writer, retain_graph);
  Future<void> done(std::make_shared<Future<void>::State>(core->helper()));
  done.state()->set_helps_backward();
  core->request(rref.reference()->owner(), {.kind = MessageKind::kRefBackward, .payload = std::move(writer.payload)},
                {.timeout = Timeout(0)}, [done](const Message&, const std::exception_ptr& error) {
                  if (error) return (void)done.state()->try_set_error(error);
                  done.state()->try_set({});
                });
  done.wait();
}

std::shared_ptr<Helper> helper_of(const Reference& reference) { return reference.core()->helper(); }

void write_reference(Writer& writer, const AnyRRef& rref, const std::string& type) {
  if (!writer.core())
    throw RpcError(RpcErrorKind::kUnsupported, -1, "[rref] a reference can be passed to workers only, not stored");
  CHORALE_CHECK(rref, "[rref] a reference that stands for nothing cannot be passed on");
  rref.reference()->check_usable("rref");
  CHORALE_CHECK(rref.reference()->core().get() == writer.core(), "[rref] reference ", rref,
                " belongs to another agent");
  const ForkData fork = writer.core()->references().fork(rref.reference(), writer.to(), type);
  if (!writer.passed) writer.passed = std::make_shared<PassedOn>(writer.core()->weak());
  writer.passed->add(fork.id, fork.fork);
  write(writer, fork);
}

std::shared_ptr<Reference> read_reference(Reader& reader, const std::string& type) {
  CHORALE_CHECK(reader.core(), "[rref] a reference can be passed to workers only, not stored");
  const auto data = read<ForkData>(reader);
  CHORALE_CHECK(data.type == type, "[rpc] a reference to a ", data.type, " came where one to a ", type, " is expected");
  auto reference = reader.core()->references().adopt(data, reader.from(), reader.gates());
  reader.note_reference();
  return reference;
}

}  // namespace chorale::rpc
