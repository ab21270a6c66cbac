// Inside rpc: the threads of an agent. They read messages and run requests.
//
// Note [Reading]
// One thread of the crew reads; a thread that has read a request sees to it that another one reads on before it runs
// the request itself, so a request changes threads only when no thread of the crew has read it. A thread that waits for
// an answer, of the crew or the user's, reads for a moment: it takes its own answer without a change of threads, and
// completes those of others. Then it sleeps until what it waits for is there. Requests that it comes across it leaves
// to the crew, which grows while its threads wait.
//
// Note [Watching]
// Most requests are done sooner than a thread is woken. So reading is passed on to a thread that is awake already: an
// idle one watches, that is, it naps, and reads if it finds that no thread does. A thread that is done with a request
// before that goes on reading itself. Only where no thread watches, one is woken for it. In the same way the reader of
// the crew stands aside, and naps, while threads that wait for their answers read: two threads that look for the same
// messages would only take the core from each other. A watcher to which nothing is passed on for a while sleeps.
//
// Note [Chains]
// When the crew may not grow any more, a thread that waits is woken for two things: to read, if no other thread can,
// and to run a request that follows from the one it runs itself. Requests have the number of the chain that they belong
// to: that of the request in which they were made. What a thread waits for can need such a request, and the thread
// itself does nothing before it is done, so running it on top of the stack keeps nothing up. Other requests are left
// alone: what a thread waits for may have come, and be needed by what it runs, but is below that on its stack.
#pragma once

#include <atomic>
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
  int rank = -1;           // for traces
};

// What is to be done about something that came; it may be nothing.
struct Job {
  std::function<void()> task{};
  bool is_short = false;  // it never waits: whatever thread has read it does it at once
  bool of_backward = false;
  uint64_t chain = 0;      // Note [Chains]; 0: none
  bool completes = false;  // what somebody waits for: done even when the crew has stopped
};

class Crew final : public Helper {
 public:
  using Sort = std::function<Job(Arrival)>;
  Crew(Post& post, Sort sort, const CrewOptions& options);
  // Called after stop().
  ~Crew() override = default;
  // Reads from now on: whatever comes may use the crew, so its owner has it by then.
  void start();

  // Runs a task on a thread of the crew.
  void run(std::function<void()> task, uint64_t chain = 0, bool completes = false);
  // Waits for a future, and reads meanwhile.
  void wait(FutureState& state, Deadline deadline) override;
  void wake_reader() override { post_.wake(); }
  // Ends the threads, which finish what they run; what is queued is dropped, unless somebody may wait for it. A thread
  // of the crew must not call it.
  void stop();

  struct Counts {
    int threads = 0, idle = 0, waiting = 0;
    size_t queued = 0;
  };
  Counts counts() const;
  bool is_own_thread() const { return Helper::of_this_thread() == this; }
  // The chain of the request that this thread runs; 0: none.
  static uint64_t current_chain();

 private:
  struct Task {
    std::function<void()> run;
    uint64_t chain = 0;
    bool completes = false;
  };
  // A thread that waits and sleeps, or is about to.
  struct Waiter {
    FutureState& state;
    const uint64_t chain;  // whose requests it may run; 0: none
    enum class Does : uint8_t { kRuns, kSleeps, kReads } does = Does::kRuns;
  };

  void work();
  // These three with the lock, which they let go of meanwhile. Runs what is queued.
  void run_queued(std::unique_lock<std::mutex>& lock);
  void read_on(std::unique_lock<std::mutex>& lock);
  void idle(std::unique_lock<std::mutex>& lock, bool looks);
  // Note [Watching]. False: there is something else to do than to read.
  bool stand_aside(std::unique_lock<std::mutex>& lock);
  void watch(std::unique_lock<std::mutex>& lock);
  static void run_safely(Task task);
  // These are called with the lock. Sees to it that a thread reads or takes what is queued.
  void call_up();
  void pass_reading_on();
  bool can_grow() const;
  void wake_a_waiter();
  bool take_of_chain(uint64_t chain, Task& task);
  // Called without the lock. True when something came.
  bool read(bool helps_backward);
  // Blocks until something has come or the future is complete.
  void read_for(FutureState& state, const Post::Receiving& next, Deadline deadline);
  void handle(Arrival arrival, bool helps_backward);
  // Reads for a while. True when there is nothing more to wait for.
  bool look(FutureState& state, Deadline deadline);
  void wait_long(FutureState& state, Deadline deadline);

  Post& post_;
  const Sort sort_;
  const CrewOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;     // for idle threads,
  std::condition_variable queue_grew_;  // and for the reader that stands aside
  std::deque<Task> queue_;
  std::vector<std::thread> threads_;
  std::vector<Waiter*> waiters_;
  int idle_ = 0, waiting_ = 0;
  int looking_ = 0;             // of the idle ones: not asleep yet
  std::atomic<int> called_{0};  // written with the lock
  // How often threads that wait for a future have looked for messages; and how often that was when the reader looked.
  std::atomic<uint64_t> looks_{0};
  uint64_t seen_looks_ = 0;
  uint64_t passed_on_ = 0;  // how often reading was
  bool watches_ = false;    // an idle thread does
  bool stands_aside_ = false;
  bool has_reader_ = false, stops_ = false;
  bool own_reader_ = false;  // the reader is a thread of the crew that has nothing else to do
};

}  // namespace chorale::rpc
