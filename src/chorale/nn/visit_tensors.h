// The tensors inside a value, whatever its type: what a module takes and returns is up to the programmer, and the code
// around it (hooks, data-parallel training, checkpointing) must still see every tensor.
//
//   struct Output {
//     Tensor logits;
//     std::vector<Tensor> hidden;
//     CHORALE_TENSORS(Output, logits, hidden)
//   };
//   visit_tensors(output, [](Tensor& x) { x = detach(x); });
//
// Known types: Tensor, pointers to known types, std::optional, pairs, tuples, maps, other containers, and structs that
// list the fields to look into. A trivially copyable type and a string hold no tensor. For any other type there is an
// error at compile time, since a tensor that is not seen would be a silent mistake.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/base/list_fields.h"
#include "chorale/tensor/tensor.h"

namespace chorale {

namespace nn {
class Module;
}

namespace detail {
template <class T>
concept ListsFields = requires(T& value) {
  visit_fields(value, [](auto&) {});
};
template <class T>
concept NamesFields = requires(const T* none) {
  names_of_fields(none);
};
template <class T>
concept Dereferences = requires(T& value) {
  static_cast<bool>(value);
  *value;
};
template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};
template <class T>
concept MapLike = requires(T& value) {
  typename T::mapped_type;
  value.begin()->second;
};
template <class T>
concept Range = requires(T& value) {
  value.begin();
  value.end();
};
}  // namespace detail

// Calls fn(tensor) for every defined tensor in `value`, in a fixed order; through a value that is not const, fn may
// take a Tensor& and put another tensor in its place.
template <class T, class Fn>
void visit_tensors(T& value, Fn&& fn) {
  using Plain = std::remove_const_t<T>;
  const auto visit = [&fn](auto& part) { visit_tensors(part, fn); };
  if constexpr (std::is_base_of_v<Tensor, Plain>) {
    if (value.defined()) fn(static_cast<std::conditional_t<std::is_const_v<T>, const Tensor, Tensor>&>(value));
  } else if constexpr (detail::ListsFields<T>) {
    visit_fields(value, visit);
  } else if constexpr (std::is_void_v<std::remove_pointer_t<Plain>> ||
                       std::is_function_v<std::remove_pointer_t<Plain>> || std::is_base_of_v<nn::Module, Plain> ||
                       std::is_convertible_v<T&, std::string_view>) {
    // Nothing to see in an opaque pointer; a module's own tensors are parameters and buffers, not inputs.
  } else if constexpr (detail::Dereferences<T>) {
    if (value) visit(*value);
  } else if constexpr (detail::MapLike<T>) {
    for (auto& entry : value) visit(entry.second);
  } else if constexpr (detail::Range<T>) {
    if constexpr (!std::is_trivially_copyable_v<std::decay_t<decltype(*value.begin())>>) {
      for (auto& part : value) visit(part);
    }
  } else if constexpr (detail::TupleLike<Plain>) {
    std::apply([&](auto&... parts) { (visit(parts), ...); }, value);
  } else {
    static_assert(std::is_trivially_copyable_v<Plain>,
                  "list the fields of this type that hold tensors: CHORALE_TENSORS(Type, field, …)");
  }
}

// The defined tensors of a value, in the order of visit_tensors.
template <class T>
std::vector<Tensor> tensors_of(const T& value) {
  std::vector<Tensor> found;
  visit_tensors(value, [&](const Tensor& x) { found.push_back(x); });
  return found;
}

// A name for each of them: that of the field that it is in, where a value among `values` is a struct that lists its
// fields, and "" elsewhere; behind those, the names of fields without a tensor. With structs and designated
// initialisers, these are names of arguments. Empty if there are no such structs.
template <class... Ts>
std::vector<std::string> names_of_tensors(const Ts&... values) {
  std::vector<std::string> names;
  [[maybe_unused]] std::vector<std::string> absent;
  if constexpr ((detail::NamesFields<Ts> || ...)) {
    const auto add = [&](const auto& value, const char* name) {
      visit_tensors(value, [&](const Tensor&) { names.emplace_back(name); });
    };
    const auto look = [&](const auto& value) {
      if constexpr (detail::NamesFields<std::decay_t<decltype(value)>>) {
        const auto fields = names_of_fields(&value);
        size_t next = 0;
        visit_fields(value, [&](const auto& part) {
          const size_t known = names.size();
          add(part, fields[next]);
          if (names.size() == known) absent.emplace_back(fields[next]);
          ++next;
        });
      } else {
        add(value, "");
      }
    };
    (look(values), ...);
    names.insert(names.end(), absent.begin(), absent.end());
  }
  return names;
}

// Puts others in their places; there must be as many.
template <class T>
void replace_tensors(T& value, const std::vector<Tensor>& tensors) {
  size_t next = 0;
  visit_tensors(value, [&](Tensor& x) {
    if (next < tensors.size()) x = tensors[next];
    ++next;
  });
  CHORALE_CHECK(next == tensors.size(), "[replace_tensors] the value holds ", next, " tensors, but ", tensors.size(),
                " were given");
}

}  // namespace chorale

// Inside a struct: the fields in which there are tensors.
#define CHORALE_TENSORS(Type, ...) CHORALE_LIST_FIELDS(Type, __VA_ARGS__)
