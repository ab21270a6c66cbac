// Inside data: work on worker threads whose results come back in order.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace chorale::data {

// Work comes in two steps. `claim` says what to do next: it is called by one thread at a time, in order, and returns
// nothing when there is no more. The job that it returns runs beside others and makes the result. next() hands results
// out in the order of the claims, whatever order they were finished in.
//
// At most `ahead` results are claimed and not handed out, which bounds memory. Without workers everything happens
// inside next(). Worker threads use one thread each for ops: they are the parallelism.
class Pipeline {
 public:
  using Result = std::shared_ptr<void>;  // never null
  using Job = std::function<Result()>;
  using Claim = std::function<Job()>;

  Pipeline(Claim claim, int workers, int ahead);
  // Stops: jobs that have begun are waited for, no other begins.
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Null at the end. Rethrows what the job or its claim threw, when its turn comes; that is the end too.
  Result next();

 private:
  struct Slot {
    bool ready = false;
    Result result;  // null: the end
    std::exception_ptr error;
  };

  explicit Pipeline(Claim claim);
  void work();
  void put(size_t ticket, Slot slot);
  Slot take();

  const Claim claim_;
  std::mutex claiming_;  // held while claim_ runs; taken before mutex_
  std::mutex mutex_;     // guards what follows
  std::condition_variable changed_;
  std::vector<Slot> slots_;  // result of ticket t: slot t % slots_.size()
  size_t claimed_ = 0;       // tickets
  size_t taken_ = 0;
  bool ended_ = false;     // no further claim
  bool stopping_ = false;  // no further job
  std::vector<std::thread> threads_;
};

}  // namespace chorale::data
