#include "chorale/comm/stream_wait.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "chorale/base/error.h"
#include "chorale/base/forks.h"
#include "chorale/device/runtime.h"
#include "chorale/device/stream.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

struct Held {
  Work work;
  std::shared_ptr<StreamGate> gate;
};

std::exception_ptr error_of(const Work& work) {
  try {
    work.wait();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

// Moves all works that streams wait for. Each is looked at in turn: one may be done only after another, whose stream
// computes what a peer needs for it. A second thread lets go of works that are done: the last reference to a group
// waits for what the group still owes its peers, and those may be waiting for a gate.
class Doorkeeper {
 public:
  Doorkeeper() : mover_([this] { move(); }), sweeper_([this] { sweep(); }) {}
  ~Doorkeeper() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    mover_.join();
    sweeper_.join();
    const auto ended = std::make_exception_ptr(StateError("[work] the process ended before the work was done"));
    for (const Held& held : held_) held.gate->open(ended);
  }
  Doorkeeper(const Doorkeeper&) = delete;
  Doorkeeper& operator=(const Doorkeeper&) = delete;

  void add(Held held) {
    {
      const std::lock_guard lock(mutex_);
      held_.push_back(std::move(held));
    }
    changed_.notify_all();
  }

 private:
  void move() {
    constexpr int kYields = 200;
    std::unique_lock lock(mutex_);
    for (int idle = 0;; ++idle) {
      changed_.wait(lock, [&] { return ending_ || !held_.empty(); });
      if (ending_) return;
      std::vector<Held> looked = held_;
      lock.unlock();
      std::erase_if(looked, [](const Held& held) { return !is_done(held.work); });  // held_ still has these
      for (const Held& held : looked) held.gate->open(error_of(held.work));
      if (!looked.empty()) {
        idle = 0;
      } else if (idle < kYields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(20us);
      }
      lock.lock();
      if (looked.empty()) continue;
      std::erase_if(held_, [&](const Held& held) {
        return std::any_of(looked.begin(), looked.end(), [&](const Held& done) { return done.gate == held.gate; });
      });
      done_.insert(done_.end(), std::make_move_iterator(looked.begin()), std::make_move_iterator(looked.end()));
      changed_.notify_all();
    }
  }
  void sweep() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ending_ || !done_.empty(); });
      std::vector<Held> done = std::exchange(done_, {});
      lock.unlock();
      const bool last = done.empty();
      done.clear();
      if (last) return;
      lock.lock();
    }
  }
  static bool is_done(const Work& work) {
    try {
      return work.is_completed();
    } catch (...) {
      return true;  // error_of() meets it again
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Held> held_, done_;
  bool ending_ = false;
  std::thread mover_, sweeper_;  // last, so that they start when the rest is there
};

// A forked child has no such thread.
Doorkeeper& doorkeeper() {
  static const std::shared_ptr<Doorkeeper> keeper = base::kept_by_children(std::make_shared<Doorkeeper>());
  return *keeper;
}

}  // namespace

bool hold_stream(const Work& work, Stream stream) {
  std::shared_ptr<StreamGate> gate = runtime_of(stream.device).hold(stream);
  if (!gate) return false;
  doorkeeper().add({work, std::move(gate)});
  return true;
}

Stream copy_stream(Device device) {
  static std::mutex mutex;
  static std::vector<Stream> streams;
  const std::lock_guard lock(mutex);
  for (const Stream& stream : streams) {
    if (stream.device == device) return stream;
  }
  return streams.emplace_back(make_stream(device));
}

}  // namespace chorale::comm
