// A thread that waits for many sockets (epoll) and calls their owners.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "chorale/transport/socket.h"

namespace chorale::transport {

class IoLoop {
 public:
  // Handlers live until the loop has stopped.
  class Handler {
   public:
    // Called in the loop's thread. `events` are epoll's. What can still be done is announced again.
    virtual void on_ready(uint32_t events) = 0;

   protected:
    ~Handler() = default;
  };

  IoLoop();
  ~IoLoop() { stop(); }
  IoLoop(const IoLoop&) = delete;
  IoLoop& operator=(const IoLoop&) = delete;

  // `tick` runs in the loop's thread, too.
  void start(std::chrono::milliseconds tick_period, std::function<void()> tick);
  void stop();

  // Any thread may call these.
  void watch(int descriptor, uint32_t events, Handler& handler);
  void change(int descriptor, uint32_t events, Handler& handler);
  void forget(int descriptor);
  void post(std::function<void()> task);
  // Called by a handler that could go on but lets others have their turn: it is called again soon, with these events.
  void again(Handler& handler, uint32_t events) { again_.emplace_back(&handler, events); }

 private:
  void run();
  void run_tasks();
  void ring() const;

  Socket epoll_;
  Socket bell_;  // an eventfd
  std::chrono::milliseconds tick_period_{};
  std::function<void()> tick_;
  std::vector<std::pair<Handler*, uint32_t>> again_;
  std::mutex mutex_;
  std::vector<std::function<void()>> tasks_;  // under mutex_
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace chorale::transport
