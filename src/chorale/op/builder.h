// Calls of ops go to the thread's current Builder. Builders stack (autocast over autograd over eager, …); each does its
// part and hands the call on. None knows the others.
#pragma once

#include <array>
#include <initializer_list>
#include <new>

#include "chorale/op/op_def.h"

namespace chorale::op {

class Builder {
 public:
  // `out` has op.outputs undefined tensors, which are set.
  virtual void call(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out) = 0;
  // Writes the results into tensors that exist; the in-place and `out` forms of every op are this call. An output may
  // be one of the inputs. Shapes must be those that the op infers; dtypes are converted within a category.
  virtual void call_into(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs,
                         std::span<const Tensor> out) = 0;

 protected:
  ~Builder() = default;
};

// What a thread starts with. Defined by `api`, which joins the layers above this one.
Builder& default_builder();

namespace detail {
extern constinit thread_local Builder* current;
}

inline Builder& current_builder() {
  if (!detail::current) [[unlikely]]
    detail::current = &default_builder();
  return *detail::current;
}

// Runs the rest of the scope under another Builder.
class Under {
 public:
  explicit Under(Builder& builder) : before_(std::exchange(detail::current, &builder)) {}
  ~Under() { detail::current = before_; }
  Under(const Under&) = delete;
  Under& operator=(const Under&) = delete;

 private:
  Builder* before_;
};

// Operands of a call, borrowed from the caller's handles: no reference is counted.
template <size_t N>
class Operands {
 public:
  template <class... Ts>
  explicit Operands(const Ts&... tensors) {
    [[maybe_unused]] size_t at = 0;
    (new (&items_[at++]) Tensor(Tensor::adopt(tensors.impl())), ...);
  }
  ~Operands() {}  // the references were never ours
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;
  operator std::span<const Tensor>() const { return {items_, N}; }  // NOLINT(google-explicit-constructor)

 private:
  union {
    Tensor items_[N == 0 ? 1 : N];
  };
};

// An op with one result.
template <class... In>
Tensor call(const OpDef& op, const Attrs& attrs, const In&... in) {
  Tensor out;
  current_builder().call(op, Operands<sizeof...(In)>(in...), attrs, {&out, 1});
  return out;
}
inline Tensor call_list(const OpDef& op, const Attrs& attrs, std::span<const Tensor> in) {
  Tensor out;
  current_builder().call(op, in, attrs, {&out, 1});
  return out;
}
// An op with several.
template <size_t kOutputs, class... In>
std::array<Tensor, kOutputs> call_many(const OpDef& op, const Attrs& attrs, const In&... in) {
  std::array<Tensor, kOutputs> out;
  current_builder().call(op, Operands<sizeof...(In)>(in...), attrs, out);
  return out;
}
// The in-place and `out` forms: returns `out`.
template <class... In>
const Tensor& call_into(const OpDef& op, const Attrs& attrs, const Tensor& out, const In&... in) {
  current_builder().call_into(op, Operands<sizeof...(In)>(in...), attrs, {&out, 1});
  return out;
}

// The last op of a gradient rule: writes the gradient of input i where it is wanted, if that is known.
template <class... In>
Tensor emit(const GradArgs& g, size_t i, const OpDef& op, const Attrs& attrs, const In&... in) {
  if (const Tensor destination = g.destination(i); destination.defined())
    return call_into(op, attrs, destination, in...);
  return call(op, attrs, in...);
}

}  // namespace chorale::op
