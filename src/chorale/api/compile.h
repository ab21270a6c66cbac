// Compiled functions and training steps.
//
//   auto step = compile([&](const Tensor& x, const Tensor& y) {
//     optimizer.zero_grad();
//     const Tensor loss = cross_entropy(model(x), y);
//     backward(loss);
//     optimizer.step();
//     return loss;
//   });
//   for (…) loss = step(x, y);
//
// The function is called with tensors as usual; what it does to them is written down, made into a graph, and run from
// the graph. Two contracts (CompileOptions::whole_graph):
// - segmented (the default): host code runs in every call. Where it asks for a value (item(), printing, a pointer) what
//   was written down so far runs, and recording goes on behind it: a break, with a reason that explain() shows;
// - whole graph: the function runs when it is traced, and never again while the guards hold: tensors of the same kinds,
//   captured tensors on the same memory, the same modes. Asking for a value inside is an error. Host values that the
//   function reads are frozen.
#pragma once

#include <array>
#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "chorale/api/segment.h"
#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/graph/kernel_list.h"

namespace chorale::comm {
class Group;
}

namespace chorale {

// Which sizes may change without compiling again (docs/usage/compile.md).
enum class Dynamic : uint8_t {
  kNever,      // each size is a graph of its own
  kAutomatic,  // what was seen with a second size
  kAlways,     // every dimension of every argument, from the start
};
// A dimension of an argument that is a symbol of its own from the start.
struct DynamicDim {
  size_t argument = 0;
  int64_t dim = 0;
};

struct CompileOptions {
  bool whole_graph = false;
  Dynamic dynamic = Dynamic::kAutomatic;
  std::vector<DynamicDim> dynamic_dims{};
  // A segmented function compares only dtypes and sizes of fully sharded parameters, since anything else about them
  // changes only when the module is sharded anew. With this option they are compared like any other tensor.
  bool guard_managed = false;
  // How graphs are run; joint_eager() unless said otherwise.
  compiled::Backend backend{};
  // Gradients through one node per graph, from a graph of their own; else through the ops, one by one.
  bool joint = true;
  // Cut forward passes of data-parallel modules at their buckets.
  bool split = true;
  // Ranks that compile the same: each time they compare their graphs, and an error names the first node that differs.
  // They must compile equally often, and use the group for nothing else. It must outlive the compiled function.
  const comm::Group* agree = nullptr;
  // Used by whole graphs. In every call but the first, a rank whose guards hold compiles again where those of another
  // do not, so that all compile equally often. One small collective per call. May be the same group.
  const comm::Group* agree_on_guards = nullptr;
  // Ranks that compile tell each other which sizes they have seen, and make the same ones symbols (Note [Shared sizes]
  // in api/shared_sizes.h). They must compile equally often. May be the same group as `agree`.
  const comm::Group* agree_on_sizes = nullptr;
  // How much of what the first half of a step computed is kept for the second: 1, all that is not as cheap to compute
  // again; 0, nothing but what leads from block to block (graph/passes/recompute.h).
  double memory_budget = 1;
  // Compilations of a stretch of the function, and of all of it; beyond either it runs uncompiled. A further size of a
  // graph with symbols is no compilation.
  int most_variants = 8;
  int most_in_all = 256;
  std::string name = "step";
  // Host values that the graph depends on: compared in every call of a whole graph.
  std::vector<std::function<int64_t()>> watch{};
};

namespace compiled {

// Runs a graph op by op.
Backend joint_eager();

// An argument of a compiled function, or a tensor or number inside of one.
struct Argument {
  size_t number = 0;
  std::string inside{};  // "[2]"
  std::variant<Tensor, int64_t, double> value;
  std::string source() const { return "arg " + std::to_string(number) + inside; }
};

// What is compiled, with its arguments.
using Body = base::FunctionRef<std::vector<Tensor>()>;

// What a compiled function did, for people and for tests.
struct Report {
  struct Compiled {
    std::string text;  // of the forward graph, with symbols where sizes may change
    size_t ops = 0;
    int64_t bucket_bytes = 0;
    std::vector<Tensor> bucket;  // parameters that were charged to it
    std::string break_reason;    // why the graph ends where it ends; empty: at the end of the function
    int64_t arena_bytes = 0;
    std::vector<graph::ListedKernel> kernels;  // what its program runs
  };
  int compiles = 0;    // stretches that were compiled, however many pieces they have
  int resizes = 0;     // further sizes of graphs with symbols: traced, and nothing compiled
  int runs = 0;        // of stretches
  int uncompiled = 0;  // calls that ran as they are
  std::vector<Compiled> graphs;
  std::vector<std::string> breaks;      // every one that happened
  std::vector<std::string> recompiles;  // the guard that failed, once each
  std::vector<std::string> guards;      // what is compared before a graph runs, by where it comes from
  std::vector<std::string> fixed;       // why sizes that changed did not become symbols, once each
  // Why graphs end before the function does: one entry per graph that has a reason.
  std::vector<std::string> break_reasons() const;
  std::string text() const;
};

class Frame {
 public:
  explicit Frame(CompileOptions options);
  ~Frame();
  // Calls `body`, or what was made of it.
  std::vector<Tensor> call(const std::vector<Argument>& arguments, Body body);
  // Whether a whole graph fits these arguments now. Checks all guards and runs nothing.
  bool has_graph_for(const std::vector<Argument>& arguments) const;
  Report report() const;
  void reset();

 private:
  class Call;
  class StrictCall;
  struct State;
  struct Variant;
  std::vector<Tensor> call_whole(const std::vector<Argument>& arguments, Body body);
  // `programs` makes those of the graphs that were traced, and says whether they are to be run.
  std::shared_ptr<Variant> trace(
      const std::vector<Argument>& arguments, Body body,
      const std::function<bool(const std::shared_ptr<Segment>&, const graph::Recording&)>& programs,
      std::vector<Tensor>& results, int attempt = 0);

  void probe(const std::vector<Argument>& arguments, Body body);
  static bool run_direct(const Variant& variant, const std::vector<Argument>& arguments, std::vector<Tensor>& results);
  static void give_up_gradients(const Variant& variant, std::vector<Tensor>& free);
  // `outside`: by tensor from outside.
  std::vector<Tensor> hand_out(const Variant& variant, const std::vector<Argument>& arguments,
                               const std::vector<Tensor>& outside, const Segment::Results& made) const;

  std::unique_ptr<State> state_;
};

// ---- from arguments to lists, and from lists to results

inline void add_argument(std::vector<Argument>& list, size_t number, std::string inside, const Tensor& x) {
  list.push_back({number, std::move(inside), x});
}
template <class T>
requires std::is_arithmetic_v<T>
void add_argument(std::vector<Argument>& list, size_t number, std::string inside, T x) {
  if constexpr (std::is_floating_point_v<T>) {
    list.push_back({number, std::move(inside), static_cast<double>(x)});
  } else {
    list.push_back({number, std::move(inside), static_cast<int64_t>(x)});
  }
}
template <class T>
void add_argument(std::vector<Argument>& list, size_t number, const std::string& inside, const std::vector<T>& xs) {
  for (size_t i = 0; i < xs.size(); ++i) add_argument(list, number, inside + "[" + std::to_string(i) + "]", xs[i]);
}
template <class... Ts>
void add_argument(std::vector<Argument>& list, size_t number, const std::string& inside, const std::variant<Ts...>& x) {
  std::visit([&](const auto& held) { add_argument(list, number, inside, held); }, x);
}

template <class T>
struct Result;
template <>
struct Result<void> {};
template <>
struct Result<Tensor> {
  static std::vector<Tensor> list(const Tensor& x) { return {x}; }
  static Tensor from(const std::vector<Tensor>& list, size_t& at) { return list[at++]; }
};
template <>
struct Result<std::vector<Tensor>> {
  static std::vector<Tensor> list(const std::vector<Tensor>& x) { return x; }
  static std::vector<Tensor> from(const std::vector<Tensor>& list, size_t& at) {
    std::vector<Tensor> rest(list.begin() + static_cast<int64_t>(at), list.end());
    at = list.size();
    return rest;
  }
};
template <class A, class B>
struct Result<std::pair<A, B>> {
  static std::vector<Tensor> list(const std::pair<A, B>& x) {
    std::vector<Tensor> all = Result<A>::list(x.first);
    for (const Tensor& y : Result<B>::list(x.second)) all.push_back(y);
    return all;
  }
  static std::pair<A, B> from(const std::vector<Tensor>& list, size_t& at) {
    A first = Result<A>::from(list, at);
    return {std::move(first), Result<B>::from(list, at)};
  }
};
template <size_t N>
struct Result<std::array<Tensor, N>> {
  static std::vector<Tensor> list(const std::array<Tensor, N>& x) { return {x.begin(), x.end()}; }
  static std::array<Tensor, N> from(const std::vector<Tensor>& list, size_t& at) {
    std::array<Tensor, N> all;
    for (Tensor& x : all) x = list[at++];
    return all;
  }
};

template <class R>
concept IsOfTensors = requires(const R& x) {
  Result<R>::list(x);
};

}  // namespace compiled

// A function that is compiled when it is called. Copies share what was compiled. Several threads may call it.
template <class F>
class Compiled {
 public:
  Compiled(F called, CompileOptions options)
      : function_(std::make_shared<F>(std::move(called))),
        frame_(std::make_shared<compiled::Frame>(std::move(options))) {}
  // Moving copies: what was moved from would have nothing to call.
  Compiled(const Compiled&) = default;
  Compiled& operator=(const Compiled&) = default;
  ~Compiled() = default;

  template <class... Args>
  auto operator()(const Args&... args) const {
    using R = std::remove_cvref_t<decltype((*function_)(args...))>;
    const std::vector<compiled::Argument> list = list_of(args...);
    if constexpr (!std::is_void_v<R> && !compiled::IsOfTensors<R>) {
      std::optional<R> value;  // of the host, which runs in every call of a segmented function
      const auto body = [&]() -> std::vector<Tensor> {
        value.emplace((*function_)(args...));
        return {};
      };
      frame_->call(list, body);
      CHORALE_CHECK_STATE(value,
                          "[compile] a whole graph returns tensors: what the host computes is not computed again");
      return *value;
    } else {
      const auto body = [&]() -> std::vector<Tensor> {
        if constexpr (std::is_void_v<R>) {
          (*function_)(args...);
          return {};
        } else {
          return compiled::Result<R>::list((*function_)(args...));
        }
      };
      const std::vector<Tensor> results = frame_->call(list, body);
      if constexpr (!std::is_void_v<R>) {
        size_t from = 0;
        return compiled::Result<R>::from(results, from);
      }
    }
  }

  // Whether a call with these arguments would run a whole graph that is there. Checks the guards only.
  template <class... Args>
  bool has_graph_for(const Args&... args) const {
    return frame_->has_graph_for(list_of(args...));
  }

  compiled::Frame& frame() const { return *frame_; }
  F& function() const { return *function_; }

 private:
  template <class... Args>
  static std::vector<compiled::Argument> list_of(const Args&... args) {
    std::vector<compiled::Argument> list;
    list.reserve(sizeof...(args));
    [[maybe_unused]] size_t at = 0;
    (compiled::add_argument(list, at++, {}, args), ...);
    return list;
  }
  std::shared_ptr<F> function_;
  std::shared_ptr<compiled::Frame> frame_;
};

namespace compiled {
template <class F>
bool is_empty(const F&) {
  return false;
}
template <class Result, class... Args>
bool is_empty(const std::function<Result(Args...)>& function) {
  return !function;
}
}  // namespace compiled

// `function` is copied; a module is given by reference: compile(std::ref(model)).
template <class F>
Compiled<F> compile(F function, CompileOptions options = {}) {
  CHORALE_CHECK(!compiled::is_empty(function), "[compile] the function is empty");
  return {std::move(function), std::move(options)};
}

// What was compiled and why: graphs, breaks, guards, buckets.
template <class F>
compiled::Report explain(const Compiled<F>& function) {
  return function.frame().report();
}

// A break in segmented functions: `what` happens here on the host. An error in whole graphs.
void break_graph(const std::string& what);
// From here on this thread makes tensors on that device, where a DeviceScope (op/device_scope.h) would put things back
// at its end. In a compiled function that is a break.
void set_device(Device device);
// The number in a tensor of one element, i64. A whole graph may have it: while it is traced a number stands for the one
// that only running tells. Sizes, attributes and factors may be made from it; a branch on it is an error.
int64_t late_item(const Tensor& x);
// A tensor made from host data that may be part of a whole graph as it is.
Tensor constant(const Tensor& x);

}  // namespace chorale
