// What a node of a test sees of another node's store.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "chorale/base/comm_error.h"
#include "chorale/transport/store/store.h"

namespace chorale::launch {

enum class Cable : uint8_t { kFine, kClosed, kSilent };

// Calls that do not arrive, and answers that do not come back.
class Line final : public transport::Store {
  // This stands before what calls it, since its type is found by looking at it.
  template <class Call>
  auto pass(Deadline deadline, const Call& call) {
    travel(deadline);
    auto answer = call();
    travel(deadline);
    return answer;
  }
  void travel(Deadline deadline) {
    if (loss_percent_ > 0) {
      for (uint64_t turns = draw() % 4; turns > 0; --turns) std::this_thread::yield();
      if (static_cast<int>(draw() % 100) < loss_percent_) throw CommError("a message was lost");
    }
    if (cable_->load() == Cable::kClosed) throw transport::StoreLost("the connection is closed");
    if (cable_->load() == Cable::kFine) return;
    std::this_thread::sleep_for(deadline.left());
    throw CommError("no answer");
  }
  uint64_t draw() {
    const std::lock_guard lock(mutex_);
    return random_();
  }

 public:
  // Loses calls and answers on purpose, if told to.
  Line(std::shared_ptr<transport::Store> store, std::shared_ptr<const std::atomic<Cable>> cable, int loss_percent = 0,
       uint64_t seed = 0)
      : store_(std::move(store)), cable_(std::move(cable)), loss_percent_(loss_percent), random_(seed) {}

  void set(std::string_view key, std::string_view value, Deadline deadline) override {
    pass(deadline, [&] { return store_->set(key, value, deadline), 0; });
  }
  std::string get(std::string_view key, Deadline deadline) override {
    return pass(deadline, [&] { return store_->get(key, deadline); });
  }
  void wait(std::span<const std::string> keys, Deadline deadline) override {
    pass(deadline, [&] { return store_->wait(keys, deadline), 0; });
  }
  bool contains(std::string_view key, Deadline deadline) override {
    return pass(deadline, [&] { return store_->contains(key, deadline); });
  }
  int64_t add(std::string_view key, int64_t delta, Deadline deadline) override {
    return pass(deadline, [&] { return store_->add(key, delta, deadline); });
  }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override {
    return pass(deadline, [&] { return store_->compare_set(key, expected, desired, deadline); });
  }
  bool remove(std::string_view key, Deadline deadline) override {
    return pass(deadline, [&] { return store_->remove(key, deadline); });
  }
  std::vector<std::string> keys(std::string_view prefix, Deadline deadline) override {
    return pass(deadline, [&] { return store_->keys(prefix, deadline); });
  }
  int64_t count(Deadline deadline) override {
    return pass(deadline, [&] { return store_->count(deadline); });
  }

 private:
  const std::shared_ptr<transport::Store> store_;
  const std::shared_ptr<const std::atomic<Cable>> cable_;
  const int loss_percent_;
  std::mutex mutex_;
  std::mt19937_64 random_;
};

}  // namespace chorale::launch
