#include "chorale/transport/io_loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/descriptors.h"
#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

int checked(int descriptor, const char* what) {
  if (descriptor < 0) throw CommError(concat("[fabric] cannot make ", what, ": ", std::strerror(errno)));
  return descriptor;
}

void control(int epoll, int operation, int descriptor, uint32_t events, void* handler) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = handler;
  epoll_ctl(epoll, operation, descriptor, &event);
}

}  // namespace

IoLoop::IoLoop()
    : epoll_(checked(above_standard(epoll_create1(EPOLL_CLOEXEC)), "an epoll descriptor"), "epoll"),
      bell_(checked(above_standard(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), "an eventfd"), "bell") {
  control(epoll_.descriptor(), EPOLL_CTL_ADD, bell_.descriptor(), EPOLLIN, nullptr);
}

void IoLoop::start(std::chrono::milliseconds tick_period, std::function<void()> tick) {
  tick_period_ = std::max(tick_period, std::chrono::milliseconds(1));
  tick_ = std::move(tick);
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), "chorale-fabric");
}

void IoLoop::stop() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  ring();
  thread_.join();
}

void IoLoop::watch(int descriptor, uint32_t events, Handler& handler) {
  control(epoll_.descriptor(), EPOLL_CTL_ADD, descriptor, events, &handler);
}
void IoLoop::change(int descriptor, uint32_t events, Handler& handler) {
  control(epoll_.descriptor(), EPOLL_CTL_MOD, descriptor, events, &handler);
}
void IoLoop::forget(int descriptor) { control(epoll_.descriptor(), EPOLL_CTL_DEL, descriptor, 0, nullptr); }

void IoLoop::post(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  ring();
}

void IoLoop::ring() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(bell_.descriptor(), &one, sizeof one);
}

void IoLoop::run_tasks() {
  uint64_t rings = 0;
  [[maybe_unused]] const ssize_t n = read(bell_.descriptor(), &rings, sizeof rings);
  std::vector<std::function<void()>> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (const auto& task : tasks) task();
}

void IoLoop::run() {
  using Clock = std::chrono::steady_clock;
  std::array<epoll_event, 64> events;
  auto next_tick = Clock::now() + tick_period_;
  while (!stopping_) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_tick - Clock::now());
    const int timeout = again_.empty() ? static_cast<int>(std::max<int64_t>(left.count(), 0)) : 0;
    const int count = epoll_wait(epoll_.descriptor(), events.data(), static_cast<int>(events.size()), timeout);
    // These handlers are called after those that have waited in the kernel.
    const auto again = std::exchange(again_, {});
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      if (event.data.ptr) {
        static_cast<Handler*>(event.data.ptr)->on_ready(event.events);
      } else {
        run_tasks();
      }
    }
    for (const auto& [handler, what] : again) handler->on_ready(what);
    if (Clock::now() >= next_tick) {
      tick_();
      next_tick = Clock::now() + tick_period_;
    }
  }
}

}  // namespace chorale::transport
