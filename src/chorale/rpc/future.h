// A value that will be there, or an error. Cheap to copy; every copy sees the same value. Thread-safe.
//
//   Future<Tensor> y = agent.call_async<embed>("server", ids);
//   Future<double> mean = y.then([](Future<Tensor> done) { return chorale::mean(done.wait()).item<double>(); });
//   Tensor z = co_await agent.call_async<embed>("server", ids);   // in a coroutine that returns a Future
//
// A future cannot be sent to another worker; a served function that returns one is answered when it is complete.
#pragma once

#include <atomic>
#include <condition_variable>
#include <coroutine>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "chorale/base/deadline.h"
#include "chorale/base/error.h"

namespace chorale::rpc {

class FutureState;

// What can be useful while a thread waits: an agent reads messages.
class Helper {
 public:
  virtual ~Helper() = default;
  // Returns when the state is complete or the deadline has passed.
  virtual void wait(FutureState& state, Deadline deadline) = 0;
  // A thread that waits for a state and blocks in something else (begin_reading()) must look at the state again.
  virtual void wake_reader() = 0;
  // A thread of an agent has one; it helps in waits for futures that have none.
  static Helper* of_this_thread();
  static void set_for_this_thread(Helper* helper);
};

// What futures of all types share.
class FutureState {
 public:
  explicit FutureState(std::shared_ptr<Helper> helper = {}) : helper_(std::move(helper)) {}
  virtual ~FutureState() = default;
  FutureState(const FutureState&) = delete;
  FutureState& operator=(const FutureState&) = delete;

  bool is_complete() const { return complete_.load(std::memory_order_acquire); }
  // Waits with the helper's help; false when the deadline has passed.
  bool wait(Deadline deadline = Deadline::never());
  // Only sleeps.
  bool sleep(Deadline deadline) { return sleep(deadline, kNoNudges); }
  // The same, but also returns when nudge() was called more often than so many times.
  bool sleep(Deadline deadline, uint64_t seen);
  uint64_t nudges() const { return nudges_.load(); }
  void nudge();
  // A thread waits for it, but cannot sleep here: when it is complete, the helper is to wake that thread. False when it
  // is complete already.
  bool begin_reading(Helper* helper);
  void end_reading(Helper* helper);
  // Runs once, on the thread that completes it; at once if it is complete.
  void add_callback(std::function<void()> callback);
  // StateError when it is complete already. False from try_…: it was.
  void set_error(std::exception_ptr error);
  bool try_set_error(std::exception_ptr error);
  const std::exception_ptr& error() const { return error_; }
  bool has_callbacks() {
    const std::lock_guard lock(mutex_);
    return !callbacks_.empty();
  }
  const std::shared_ptr<Helper>& helper() const { return helper_; }
  // A thread that waits for it runs what comes for backward passes, too, instead of leaving that to other threads.
  void set_helps_backward() { helps_backward_ = true; }
  bool helps_backward() const { return helps_backward_; }

 protected:
  // `set` puts the value in place.
  template <class Set>
  bool complete(const Set& set) {
    std::vector<std::function<void()>> callbacks;
    {
      const std::lock_guard lock(mutex_);
      if (is_complete()) return false;
      set();
      complete_.store(true, std::memory_order_release);
      callbacks.swap(callbacks_);
      if (sleepers_ > 0) changed_.notify_all();
      for (Helper* reader : readers_) reader->wake_reader();
    }
    for (const auto& callback : callbacks) callback();
    return true;
  }
  [[noreturn]] static void raise_twice();

 private:
  static constexpr uint64_t kNoNudges = std::numeric_limits<uint64_t>::max();

  std::atomic<bool> complete_{false};
  std::atomic<uint64_t> nudges_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  int sleepers_ = 0;
  std::vector<Helper*> readers_;
  std::vector<std::function<void()>> callbacks_;
  std::exception_ptr error_;
  const std::shared_ptr<Helper> helper_;
  bool helps_backward_ = false;
};

template <class T>
class ValueState final : public FutureState {
 public:
  using FutureState::FutureState;
  bool try_set(T value) {
    return complete([&] { value_.emplace(std::move(value)); });
  }
  void set(T value) {
    if (!try_set(std::move(value))) raise_twice();
  }
  const T& value() const {
    if (error()) std::rethrow_exception(error());
    return *value_;
  }

 private:
  std::optional<T> value_;
};

namespace detail {
template <class T>
using Stored = std::conditional_t<std::is_void_v<T>, std::monostate, T>;
template <class T>
struct CoroutinePromise;
}  // namespace detail

template <class T>
class Future {
 public:
  using Value = T;
  using Stored = detail::Stored<T>;
  using State = ValueState<Stored>;
  using promise_type = detail::CoroutinePromise<T>;  // NOLINT(readability-identifier-naming): the language's name

  // One that is completed by hand.
  Future() : state_(std::make_shared<State>()) {}
  explicit Future(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Waits, and gives the value or throws the error, as often as it is called.
  T wait() const {
    state_->wait();
    return value();
  }
  // Throws a StateError when the value is not there in time.
  T wait(Deadline deadline) const {
    CHORALE_CHECK_STATE(state_->wait(deadline), "[future] the value is not there in time");
    return value();
  }
  bool is_complete() const { return state_->is_complete(); }
  bool has_error() const { return is_complete() && state_->error() != nullptr; }

  // Sets the value by hand; the second time is a StateError.
  void set(Stored value) const { state_->set(std::move(value)); }
  void set() const requires std::is_void_v<T> { state_->set({}); }
  void set_error(std::exception_ptr error) const { state_->set_error(std::move(error)); }

  // f gets this future, complete, so that it sees errors too; what it throws is the error of the result. If it returns
  // a future, the result is complete when that one is. It runs on the thread that completes this one.
  template <class F, class = std::enable_if_t<std::is_invocable_v<F&, Future>>>
  auto then(F f) const;
  // The same, for its effect alone: what f throws is logged.
  template <class F>
  void on_complete(F f) const;

  const std::shared_ptr<State>& state() const { return state_; }

  // co_await
  bool await_ready() const { return is_complete(); }
  void await_suspend(std::coroutine_handle<> waiting) const {
    state_->add_callback([waiting] { waiting.resume(); });
  }
  T await_resume() const { return value(); }

 private:
  T value() const {
    if constexpr (std::is_void_v<T>) {
      state_->value();
    } else {
      return state_->value();
    }
  }
  std::shared_ptr<State> state_;
};

namespace detail {

template <class T>
struct IsFuture : std::false_type {};
template <class T>
struct IsFuture<Future<T>> : std::true_type {};
template <class T>
struct WithoutFuture {
  using Type = T;
};
template <class T>
struct WithoutFuture<Future<T>> {
  using Type = T;
};

// Completes `to` with what f() gives.
template <class T, class F>
void complete_with(const Future<T>& to, F& f) {
  using Result = decltype(f());
  try {
    if constexpr (IsFuture<Result>::value) {
      const Result inner = f();
      inner.state()->add_callback([to, inner] {
        auto take = [&] { return inner.wait(); };
        complete_with(to, take);
      });
    } else if constexpr (std::is_void_v<Result>) {
      f();
      to.state()->try_set({});
    } else {
      to.state()->try_set(f());
    }
  } catch (...) {
    to.state()->try_set_error(std::current_exception());
  }
}

void log_lost_error(const std::exception_ptr& error);

template <class T>
struct CoroutinePromiseBase {
  Future<T> future;
  Future<T> get_return_object() { return future; }
  std::suspend_never initial_suspend() noexcept { return {}; }
  std::suspend_never final_suspend() noexcept { return {}; }
  void unhandled_exception() { future.set_error(std::current_exception()); }
};
template <class T>
struct CoroutinePromise : CoroutinePromiseBase<T> {
  void return_value(T value) { this->future.set(std::move(value)); }
};
template <>
struct CoroutinePromise<void> : CoroutinePromiseBase<void> {
  void return_void() { this->future.set({}); }
};

}  // namespace detail

template <class T>
template <class F, class>
auto Future<T>::then(F f) const {
  using Result = typename detail::WithoutFuture<std::invoke_result_t<F&, Future<T>>>::Type;
  Future<Result> result(std::make_shared<typename Future<Result>::State>(state_->helper()));
  state_->add_callback([own = *this, result, f = std::move(f)]() mutable {
    auto call = [&] { return f(own); };
    detail::complete_with(result, call);
  });
  return result;
}

template <class T>
template <class F>
void Future<T>::on_complete(F f) const {
  state_->add_callback([own = *this, f = std::move(f)]() mutable {
    try {
      f(own);
    } catch (...) {
      detail::log_lost_error(std::current_exception());
    }
  });
}

template <class T>
Future<T> ready(T value) {
  Future<T> future;
  future.set(std::move(value));
  return future;
}

// Complete when all are; with what each became.
template <class T>
Future<std::vector<Future<T>>> collect_all(const std::vector<Future<T>>& futures) {
  using All = Future<std::vector<Future<T>>>;
  All all(std::make_shared<typename All::State>(futures.empty() ? nullptr : futures[0].state()->helper()));
  if (futures.empty()) {
    all.set({});
    return all;
  }
  auto left = std::make_shared<std::atomic<size_t>>(futures.size());
  for (const Future<T>& future : futures) {
    future.state()->add_callback([all, left, futures] {
      if (left->fetch_sub(1) == 1) all.set(futures);
    });
  }
  return all;
}

// Complete when all are, or with the first error as soon as there is one.
template <class T>
Future<void> all_or_error(const std::vector<Future<T>>& futures) {
  Future<void> all(std::make_shared<Future<void>::State>(futures.empty() ? nullptr : futures[0].state()->helper()));
  if (futures.empty()) {
    all.set({});
    return all;
  }
  auto left = std::make_shared<std::atomic<size_t>>(futures.size());
  for (const Future<T>& future : futures) {
    FutureState* const state = future.state().get();
    future.state()->add_callback([all, left, state] {
      if (state->error()) {
        all.state()->try_set_error(state->error());
      } else if (left->fetch_sub(1) == 1) {
        all.state()->try_set({});
      }
    });
  }
  return all;
}

// The values; throws the first error as soon as there is one, without waiting for the others.
template <class T>
auto wait_all(const std::vector<Future<T>>& futures) {
  all_or_error(futures).wait();
  if constexpr (!std::is_void_v<T>) {
    std::vector<T> values;
    values.reserve(futures.size());
    for (const Future<T>& future : futures) values.push_back(future.wait());
    return values;
  }
}

}  // namespace chorale::rpc
