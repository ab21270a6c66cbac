// Inside rpc: the threads of an agent. They read messages and run requests.
//
// Note [Reading]
// One thread of the crew reads; a thread that has read a request sees to it that another one reads on before it runs
// the request itself, so a request changes threads only when no thread of the crew has read it. A thread that waits for
// an answer, of the crew or the user's, reads too: it takes its own answer without a change of threads, and completes
// those of others. Requests that it comes across it leaves to the crew, which grows while its threads wait. (It must
// not run them itself: what it waits for may have come, and be needed by what it runs, but is below that on its stack.)
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "chorale/rpc/future.h"
#include "chorale/rpc/post.h"

namespace chorale::rpc {

struct CrewOptions {
  int threads = 16;        // that are not waiting for something
  int most_threads = 256;  // with those that wait
};

// What is to be done about something that came; it may be nothing.
struct Job {
  std::function<void()> task{};
  bool is_short = false;  // it never waits: whatever thread has read it does it at once
  bool of_backward = false;
};

class Crew final : public Helper {
 public:
  using Task = std::function<void()>;
  using Sort = std::function<Job(Arrival)>;
  Crew(Post& post, Sort sort, const CrewOptions& options);
  // After stop().
  ~Crew() override = default;

  // Runs a task on a thread of the crew.
  void run(Task task);
  // Waits for a future, and reads meanwhile.
  void wait(FutureState& state, Deadline deadline) override;
  // Ends the threads, which finish what they run; what is queued is dropped. A thread of the crew must not call it.
  void stop();

  struct Counts {
    int threads = 0, idle = 0, waiting = 0;
    size_t queued = 0;
  };
  Counts counts() const;
  bool is_own_thread() const { return Helper::of_this_thread() == this; }

 private:
  void work();
  // With the lock: sees to it that a thread reads or takes what is queued.
  void call_up();
  bool read(bool helps_backward);
  void wait_long(FutureState& state, Deadline deadline);

  Post& post_;
  const Sort sort_;
  const CrewOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  std::vector<std::thread> threads_;
  int idle_ = 0, called_ = 0, waiting_ = 0;
  bool has_reader_ = false, stops_ = false;
};

}  // namespace chorale::rpc
