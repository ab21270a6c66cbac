// Calls of ops go through the thread's stack of Builders, from the top down: each does its part and hands the call on
// to the rest. None knows the others; `api` joins them.
#pragma once

#include <array>
#include <initializer_list>
#include <memory>
#include <new>

#include "chorale/op/op_def.h"

namespace chorale {
class Generator;
}

namespace chorale::op {

// Where a Builder stands in a stack, from the top down; one at each place at most.
enum class Place : uint8_t {
  kAutocast,  // changes what is called, for the length of a scope
  kAutograd,  // records, and sees whole tensors where the places below see shards
  kSharding,  // runs the op on shards
  kBottom,    // runs the op now, or traces it; every stack has one
};
inline constexpr size_t kPlaces = 4;

class Rest;

class Builder {
 public:
  Place place() const { return place_; }

  // `out` has op.outputs undefined tensors, which are set.
  virtual void call(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
                    Rest rest) = 0;
  // Writes the results into tensors that exist; the in-place and `out` forms of every op are this call. An output may
  // be one of the inputs. Shapes must be those that the op infers; dtypes are converted within a category.
  virtual void call_into(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                         Rest rest) = 0;
  // A stretch of random words for a random op (op/random.h says what it looks like). Unless overridden, the rest's.
  virtual Tensor draw(Generator& generator, int64_t words, Device device, Rest rest);
  // Makes x look at the bytes, shape and dtype of another tensor. Unless overridden, the rest does it.
  virtual void set_data(const Tensor& x, const Tensor& other, Rest rest);

  // One that does the same and lives for as long as it is held, for what is run again when the scope of this one has
  // ended. Unless overridden this one itself, which suits a Builder that lives as long as the process.
  virtual std::shared_ptr<Builder> keep();
  // Whether memory that nobody else can see may be written again instead of allocated. A tracer says no: a graph must
  // not depend on how many handles there were while it was recorded.
  virtual bool may_reuse_memory() const { return true; }

 protected:
  explicit Builder(Place place) : place_(place) {}
  ~Builder() = default;

 private:
  Place place_;
};

// What is below a Builder in the stack of the call.
class Rest {
 public:
  void call(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out) const {
    (*next_)->call(op, in, attrs, out, below());
  }
  void call_into(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out) const {
    (*next_)->call_into(op, in, attrs, out, below());
  }
  Tensor draw(Generator& generator, int64_t words, Device device) const {
    return (*next_)->draw(generator, words, device, below());
  }
  void set_data(const Tensor& x, const Tensor& other) const { (*next_)->set_data(x, other, below()); }

  // Whether the same Builders follow.
  friend bool operator==(Rest a, Rest b) {
    for (; *a.next_ == *b.next_; ++a.next_, ++b.next_) {
      if (!*a.next_) return true;
    }
    return false;
  }

 private:
  friend class Stack;
  explicit Rest(Builder* const* next) : next_(next) {}
  Rest below() const { return Rest(next_ + 1); }

  Builder* const* next_;  // ends with null
};

// Builders by place. They must outlive it.
class Stack {
 public:
  Stack(std::initializer_list<Builder*> builders) {
    for (Builder* builder : builders) put(*builder);
  }
  explicit Stack(Rest rest) {
    for (Builder* const* at = rest.next_; *at; ++at) put(**at);
  }
  // The same with `builder` at its place, instead of what may stand there.
  Stack with(Builder& builder) const {
    Stack other = *this;
    other.put(builder);
    return other;
  }
  Stack without(Place place) const;
  Builder* at(Place place) const;  // or null
  Rest all() const { return Rest(builders_); }
  // Whether all of them allow it.
  bool may_reuse_memory() const;

 private:
  void put(Builder& builder);

  Builder* builders_[kPlaces + 1] = {};  // those that there are, from the top down
};

// A stack that lives on when the scopes that made it have ended.
class KeptStack {
 public:
  explicit KeptStack(const Stack& stack);
  const Stack& stack() const { return stack_; }

 private:
  std::vector<std::shared_ptr<Builder>> builders_;
  Stack stack_;
};

// What a thread starts with. Defined by `api`, which joins the layers above this one.
const Stack& default_stack();

namespace detail {
extern constinit thread_local const Stack* current;
}

inline const Stack& current_stack() {
  if (!detail::current) [[unlikely]]
    detail::current = &default_stack();
  return *detail::current;
}
// All of the thread's stack: what a call goes to.
inline Rest current() { return current_stack().all(); }

// Runs the rest of the scope under another stack.
class Under {
 public:
  explicit Under(const Stack& stack) : stack_(stack), before_(std::exchange(detail::current, &stack_)) {}
  ~Under() { detail::current = before_; }
  Under(const Under&) = delete;
  Under& operator=(const Under&) = delete;

 private:
  Stack stack_;
  const Stack* before_;
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

// An op with one result. Inlined by order: in a large translation unit the compiler would stop doing so, which every
// small op pays.
template <class... In>
[[gnu::always_inline]] inline Tensor call(const OpDef& op, const Attrs& attrs, const In&... in) {
  Tensor out;
  current().call(op, Operands<sizeof...(In)>(in...), attrs, {&out, 1});
  return out;
}
inline Tensor call_list(const OpDef& op, const Attrs& attrs, std::span<const Tensor> in) {
  Tensor out;
  current().call(op, in, attrs, {&out, 1});
  return out;
}
// An op with several.
template <size_t kOutputs, class... In>
std::array<Tensor, kOutputs> call_many(const OpDef& op, const Attrs& attrs, const In&... in) {
  std::array<Tensor, kOutputs> out;
  current().call(op, Operands<sizeof...(In)>(in...), attrs, out);
  return out;
}
// The in-place and `out` forms: returns `out`.
template <class... In>
const Tensor& call_into(const OpDef& op, const Attrs& attrs, const Tensor& out, const In&... in) {
  current().call_into(op, Operands<sizeof...(In)>(in...), attrs, {&out, 1});
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
