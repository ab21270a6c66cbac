// Numbers of the host that decide what a function does: whether a module trains, which options an optimizer has. They
// are read while a function is traced, and a whole graph reads nothing of the host when it runs; so it notes what was
// read, and runs only while that is the same.
#pragma once

#include <cstdint>
#include <memory>

namespace chorale::graph {

// Its owner and the graphs that read it may go in any order.
class HostValue {
 public:
  explicit HostValue(int64_t value) : cell_(std::make_shared<int64_t>(value)) {}
  // A copy is a number of its own. One that moves takes along the graphs that hold it.
  HostValue(const HostValue& other) : HostValue(other.value()) {}
  HostValue(HostValue&&) noexcept = default;
  HostValue& operator=(const HostValue& other) {
    set(other.value());
    return *this;
  }
  ~HostValue() = default;

  // `what` names it in messages ("whether a module trains"), and is there for good.
  int64_t read(const char* what) const;
  void set(int64_t value) { exchange(value); }
  int64_t exchange(int64_t value);
  // The value, without a note that it was read.
  int64_t value() const { return cell_ ? *cell_ : 0; }

 private:
  std::shared_ptr<int64_t> cell_;  // null once it was moved from
};

}  // namespace chorale::graph
