// A reference to a value on some worker, its owner. Copies are cheap. It can be passed to other workers, and the value
// lives until the last of them has let go of it.
//
//   RRef<Tensor> y = agent.remote<embed>("server", ids);   // at once; the server computes meanwhile
//   agent.call<consume>("other", y);
//   Tensor here = y.to_here();
#pragma once

#include <memory>
#include <ostream>

#include "chorale/base/rpc_error.h"
#include "chorale/rpc/references.h"
#include "chorale/rpc/worker.h"

namespace chorale::rpc {

// What does not depend on the type of the value.
class AnyRRef {
 public:
  AnyRRef() = default;
  explicit AnyRRef(std::shared_ptr<Reference> reference) : reference_(std::move(reference)) {}

  bool is_owner() const { return get().is_owner(); }
  WorkerInfo owner() const;
  GlobalId id() const { return get().id(); }
  // Whether the owner knows of this reference.
  bool is_confirmed() const;
  // Complete when the owner has the value, or will have it: the answer to remote().
  Future<void> created() const;
  // What the value is, as its owner says when it is there; an error when the value could not be made. Asked once: all
  // handles of this worker get the same answer, also while it is awaited.
  Future<std::string> type_async(std::optional<Timeout> timeout = {}) const;
  std::string type(std::optional<Timeout> timeout = {}) const { return type_async(timeout).wait(); }
  const std::shared_ptr<Reference>& reference() const { return reference_; }
  explicit operator bool() const { return reference_ != nullptr; }

 protected:
  const Reference& get() const;
  // The answer of the owner, read by `take`.
  void fetch(const std::string& type, std::optional<Timeout> timeout,
             std::function<void(Reader*, const std::exception_ptr&)> take, FutureState* future) const;
  AnyValue local(const char* call, const std::type_info& type) const;

  std::shared_ptr<Reference> reference_;
};
std::ostream& operator<<(std::ostream& out, const AnyRRef& rref);

// Backward from the tensor of one element that a reference stands for. Its owner may call it without a context, and it
// then does what chorale::backward() does. Otherwise it runs in a context of distributed autograd, with the owner as
// the worker where it begins.
void backward(const AnyRRef& rref, uint64_t context = 0, bool retain_graph = false);

void write_reference(Writer& writer, const AnyRRef& rref, const std::string& type);
std::shared_ptr<Reference> read_reference(Reader& reader, const std::string& type);
std::shared_ptr<Helper> helper_of(const Reference& reference);

template <class T>
class RRef : public AnyRRef {
 public:
  using AnyRRef::AnyRRef;

  // A copy of the value; on the owner the value itself, without a message. Throws what the function threw that was to
  // make it, every time.
  T to_here(std::optional<Timeout> timeout = {}) const { return to_here_async(timeout).wait(); }
  Future<T> to_here_async(std::optional<Timeout> timeout = {}) const {
    const bool here = is_owner();
    get().check_usable("to_here");
    Future<T> future(std::make_shared<typename Future<T>::State>(helper_of(get())));
    if (here) {
      const auto owner = std::static_pointer_cast<OwnerReference>(reference_);
      owner->value.state()->add_callback([future, owner] {
        if (const auto error = owner->value.state()->error()) return future.set_error(error);
        future.set(*static_cast<const T*>(owner->value.state()->value().object.get()));
      });
      return future;
    }
    static_assert(Sendable<T>, "this value stays on its owner: call its methods there");
    fetch(
        value_type<T>().name, timeout,
        [future, own = *this](Reader* reader, const std::exception_ptr& error) {
          if (error) return (void)future.state()->try_set_error(error);
          future.state()->try_set(read<T>(*reader));
        },
        future.state().get());
    return future;
  }
  // The value itself; waits until it is there. RpcError (kNotOwner) elsewhere.
  T& local_value() const { return *static_cast<T*>(local("local_value", typeid(T)).object.get()); }
};

template <class T>
struct Codec<RRef<T>> {
  static constexpr size_t kLeast = 32;
  static std::string name() { return concat("rref<", type_name<T>(), ">"); }
  static void write(Writer& writer, const RRef<T>& value) { write_reference(writer, value, value_type<T>().name); }
  static RRef<T> read(Reader& reader) { return RRef<T>(read_reference(reader, value_type<T>().name)); }
};

}  // namespace chorale::rpc
