// Methods of an object whose type is known at run time only: its owner is asked once, and every handle of the reference
// on this worker knows the answer from then on.
//
//   rpc::Proxy table(agent, some_rref);
//   Tensor row = table.call<&Table::row>(3);
#pragma once

#include "chorale/rpc/agent.h"

namespace chorale::rpc {

class Proxy {
 public:
  // `timeout`: of the question for the type and of each call; none: the agent's.
  Proxy(const Agent& agent, AnyRRef object, std::optional<Timeout> timeout = {})
      : agent_(agent), object_(std::move(object)), timeout_(timeout) {}

  // RpcError (kUnsupported) when the object has another type, and so no such method; kUnknownFunction when its owner
  // does not serve it.
  template <auto F, class... Args>
  auto call(const Args&... args) {
    return call_async<F>(args...).wait();
  }
  template <auto F, class... Args>
  auto call_async(const Args&... args) {
    using Object = typename detail::FunctionTraits<decltype(F)>::Object;
    return object_.type_async(timeout_).then([own = *this, args...](const Future<std::string>& type) mutable {
      check(type.wait(), value_type<Object>().name, own.object_);
      return own.agent_.template call_async<F>(own.to(), RRef<Object>(own.object_.reference()), args...);
    });
  }
  // Waits for the type, not for the result.
  template <auto F, class... Args>
  auto remote(const Args&... args) {
    using Object = typename detail::FunctionTraits<decltype(F)>::Object;
    check(object_.type_async(timeout_).wait(), value_type<Object>().name, object_);
    return agent_.remote<F>(to(), RRef<Object>(object_.reference()), args...);
  }

 private:
  To to() const {
    const To owner(object_.owner());
    return timeout_ ? owner.within(*timeout_) : owner;
  }
  static void check(const std::string& type, const std::string& wanted, const AnyRRef& object);

  Agent agent_;
  AnyRRef object_;
  std::optional<Timeout> timeout_;
};

}  // namespace chorale::rpc
