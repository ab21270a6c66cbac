// Functions that a worker serves. What travels is a name and the types of arguments and result, never code.
//
//   Tensor embed(const Tensor& ids);
//   rpc::Agent agent(group, {.name = "server", .serves = {rpc::remote<embed>}});
//
// Free functions, static methods, and methods of objects that a remote reference stands for (`remote<&Table::row>`). A
// function that returns a Future<T> is answered with the T, when it is there; its thread is free meanwhile.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <typeinfo>
#include <utility>

#include "chorale/rpc/codec.h"
#include "chorale/rpc/future.h"

namespace chorale::rpc {

template <class T>
class RRef;

// ---- values of types that are known only to the code that made them

struct ValueType {
  std::string name;
  const std::type_info& type;
  void (*write)(Writer& writer, const void* object);  // throws RpcError (kUnsupported) where a type cannot travel
};

[[noreturn]] void raise_not_sendable(const std::string& name);
std::string readable_name(const std::type_info& type);

template <class T>
std::string type_name() {
  if constexpr (Sendable<T>) return Codec<T>::name();
  return readable_name(typeid(T));
}
template <class T>
const ValueType& value_type() {
  static const ValueType type{type_name<T>(), typeid(T), [](Writer& writer, const void* object) {
                                if constexpr (Sendable<T>) {
                                  Codec<T>::write(writer, *static_cast<const T*>(object));
                                } else {
                                  raise_not_sendable(readable_name(typeid(T)));
                                }
                              }};
  return type;
}

struct AnyValue {
  std::shared_ptr<void> object{};
  const ValueType* type = nullptr;
};
template <class T>
AnyValue any_value(T value) {
  return {std::make_shared<T>(std::move(value)), &value_type<T>()};
}

// ---- functions

// Called once with the result, or with an error.
using Reply = std::function<void(AnyValue value, std::exception_ptr error)>;

// Functions of functions alone, so that the compiler makes it: a list of them at namespace scope may be filled while
// other variables of the program are not made yet.
struct Served {
  std::string (*name)();
  std::string (*signature)();  // "(tensor,i64) -> tensor"
  // Reads the arguments; what it returns runs the function.
  std::function<void(const Reply&)> (*prepare)(Reader&);
};

namespace detail {

template <class F>
struct FunctionTraits;
template <class R, class... A>
struct FunctionTraits<R (*)(A...)> {
  using Returned = R;
  using Result = typename WithoutFuture<R>::Type;
  using Stored = detail::Stored<Result>;
  using Arguments = std::tuple<std::decay_t<A>...>;
};
template <class R, class... A>
struct FunctionTraits<R (*)(A...) noexcept> : FunctionTraits<R (*)(A...)> {};
// A method: the reference comes first.
template <class R, class C, class... A>
struct FunctionTraits<R (C::*)(A...)> {
  using Object = C;
  using Returned = R;
  using Result = typename WithoutFuture<R>::Type;
  using Stored = detail::Stored<Result>;
  using Arguments = std::tuple<RRef<C>, std::decay_t<A>...>;
};
template <class R, class C, class... A>
struct FunctionTraits<R (C::*)(A...) const> : FunctionTraits<R (C::*)(A...)> {};

// "name(types) -> type" of a function, taken from the compiler's own text for it.
std::string name_in(std::string_view pretty);
template <auto F>
std::string function_name() {
  return name_in(__PRETTY_FUNCTION__);
}

template <class F>
std::string signature_of() {
  using Traits = FunctionTraits<F>;
  return concat(Codec<typename Traits::Arguments>::name(), " -> ", value_type<typename Traits::Stored>().name);
}

template <auto F, class Arguments>
decltype(auto) apply(Arguments& arguments) {
  if constexpr (std::is_member_function_pointer_v<decltype(F)>) {
    return std::apply([](auto& object, auto&... rest) -> decltype(auto) { return (object.local_value().*F)(rest...); },
                      arguments);
  } else {
    return std::apply([](auto&... all) -> decltype(auto) { return F(all...); }, arguments);
  }
}

template <auto F>
std::function<void(const Reply&)> prepare_call(Reader& reader) {
  using Traits = FunctionTraits<decltype(F)>;
  using Arguments = typename Traits::Arguments;
  auto arguments = std::make_shared<Arguments>(read<Arguments>(reader));
  reader.finish();
  return [arguments](const Reply& reply) {
    using Returned = typename Traits::Returned;
    if constexpr (IsFuture<Returned>::value) {
      const Returned future = apply<F>(*arguments);
      future.state()->add_callback([reply, future, arguments] {
        if (future.state()->error()) {
          reply({}, future.state()->error());
        } else {
          reply(any_value(typename Traits::Stored(future.state()->value())), nullptr);
        }
      });
    } else if constexpr (std::is_void_v<Returned>) {
      apply<F>(*arguments);
      reply(any_value(std::monostate()), nullptr);
    } else {
      reply(any_value(typename Traits::Stored(apply<F>(*arguments))), nullptr);
    }
  };
}

}  // namespace detail

template <auto F>
inline constexpr Served remote{detail::function_name<F>, detail::signature_of<decltype(F)>, detail::prepare_call<F>};

// Makes an object on a worker: agent.remote<make<Table, int64_t>>("server", 100).
template <class T, class... Args>
T make(Args... args) {
  return T(std::move(args)...);
}

}  // namespace chorale::rpc
