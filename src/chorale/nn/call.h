// How a module is called: forward itself, or with hooks around it; an error of a bad value says in which layer.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/nn/hooks.h"
#include "chorale/nn/visit_tensors.h"

namespace chorale::nn {

namespace detail {

// Throws the error that is being handled again, with the layer that it came from: its path from `module` on.
[[noreturn]] void raise_in_layer(const Module& module, const InvalidArgument& error);

template <class M, class Arguments, class Forward>
auto call_between_hooks(M& module, Arguments& arguments, const Forward& forward) {
  // Hooks get the module, and may change it, also when it is called as a const one.
  HookedCall call(const_cast<std::remove_const_t<M>&>(module));
  replace_tensors(arguments,
                  call.before(tensors_of(arguments),
                              std::apply([](const auto&... parts) { return names_of_tensors(parts...); }, arguments)));
  if constexpr (std::is_void_v<decltype(forward())>) {
    forward();
    call.after({});
  } else {
    auto result = forward();
    replace_tensors(result, call.after(tensors_of(result)));
    return result;
  }
}

template <class M, class... Args>
auto call_with_hooks(M& module, Args&&... args) {
  if constexpr (requires { module.forward(std::declval<const std::decay_t<Args>&>()...); } &&
                (std::is_copy_constructible_v<std::decay_t<Args>> && ...)) {
    // Hooks may replace tensors in copies: those of the caller stay.
    std::tuple<std::decay_t<Args>...> copies(std::forward<Args>(args)...);
    return call_between_hooks(module, copies, [&] {
      return std::apply([&](const auto&... copy) { return module.forward(copy...); }, copies);
    });
  } else {
    // Forward writes to an argument or keeps it: that must be the caller's own.
    std::tuple<Args&...> own(args...);
    return call_between_hooks(module, own, [&] { return module.forward(std::forward<Args>(args)...); });
  }
}

}  // namespace detail

template <class M, class... Args>
concept ForwardIsConst = requires(const M& module, Args&&... args) {
  module.forward(std::forward<Args>(args)...);
};

template <class M, class... Args>
auto call(M& module, Args&&... args) {
  try {
    module.need_whole();
    if (!module.hooks()) [[likely]]
      return module.forward(std::forward<Args>(args)...);
    return detail::call_with_hooks(module, std::forward<Args>(args)...);
  } catch (const InvalidArgument& error) {
    detail::raise_in_layer(module, error);
  }
}

}  // namespace chorale::nn
