// Functions that give one result after the other. They are coroutines that yield; the caller takes results as they
// come, and stops when it has enough.
//
//   rpc::Stream<int64_t> count(int64_t to) { for (int64_t i = 0; i < to; ++i) co_yield i; }
//   rpc::AgentOptions options{.serves = rpc::stream_functions<count>()};
//   rpc::RemoteStream<int64_t> numbers = rpc::stream<count>(agent, "server", 10);
//   while (const std::optional<int64_t> number = numbers.next()) …
//
// The function runs on its worker while a result is asked for: one is asked for ahead, so it computes the next one
// while the caller uses the last. Its parameters are values: references would not outlive the call. It ends when it
// returns, throws (next() throws that), or the caller lets go of the stream.
#pragma once

#include <coroutine>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "chorale/rpc/agent.h"

namespace chorale::rpc {

// The end on the worker that gives the results.
template <class T>
class Stream {
 public:
  struct Promise {
    std::optional<T> value;
    std::exception_ptr error;
    Stream get_return_object() { return Stream(std::coroutine_handle<Promise>::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    std::suspend_always yield_value(T next) {
      value.emplace(std::move(next));
      return {};
    }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }
  };
  using promise_type = Promise;  // NOLINT(readability-identifier-naming): the language's name
  using Value = T;

  Stream(Stream&& other) noexcept : body_(std::exchange(other.body_, nullptr)) {}
  Stream& operator=(Stream&&) = delete;
  ~Stream() {
    if (body_) body_.destroy();
  }

  // The next result; nothing when there are no more, again and again.
  std::optional<T> next() {
    const std::lock_guard lock(*mutex_);
    if (body_.done()) return std::nullopt;
    body_.promise().value.reset();
    body_.resume();
    if (body_.promise().error) std::rethrow_exception(std::exchange(body_.promise().error, nullptr));
    return std::move(body_.promise().value);
  }

 private:
  explicit Stream(std::coroutine_handle<Promise> body) : body_(body) {}
  std::coroutine_handle<Promise> body_;
  std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();
};

// The end on the worker that takes them. One thread at a time may use it.
template <class T>
class RemoteStream {
 public:
  RemoteStream(const Agent& agent, RRef<Stream<T>> source) : agent_(agent), source_(std::move(source)) { ask(); }
  std::optional<T> next() {
    if (!ahead_) return std::nullopt;
    const Future<std::optional<T>> asked = *std::exchange(ahead_, std::nullopt);
    std::optional<T> value = asked.wait();
    if (value) ask();
    return value;
  }

 private:
  void ask() { ahead_ = agent_.template call_async<&Stream<T>::next>(source_); }

  Agent agent_;
  RRef<Stream<T>> source_;
  std::optional<Future<std::optional<T>>> ahead_;
};

// What a worker serves that gives the results of F.
template <auto F>
std::vector<Served> stream_functions() {
  using Result = typename detail::FunctionTraits<decltype(F)>::Result;
  return {remote<F>, remote<&Result::next>};
}

template <auto F, class... Args>
auto stream(Agent& agent, const To& to, const Args&... args) {
  using Result = typename detail::FunctionTraits<decltype(F)>::Result;
  return RemoteStream<typename Result::Value>(agent, agent.remote<F>(to, args...));
}

}  // namespace chorale::rpc
