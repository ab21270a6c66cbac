// Work that is recorded once and run many times: what was put on a stream, without the cost of the calls that put it
// there.
#pragma once

#include <memory>

#include "chorale/device/device.h"

namespace chorale {

// A runtime's form of it.
class ProgramState {
 public:
  virtual ~ProgramState() = default;
  virtual void run(Stream stream) = 0;
};

// Memory that a program names must live, and stay where it is, as long as the program is run.
class Program {
 public:
  // Runs the program in the order of the stream; the host does not wait.
  void run(Stream stream) const { state_->run(stream); }

 private:
  friend class Recording;
  explicit Program(std::unique_ptr<ProgramState> state) : state_(std::move(state)) {}
  std::unique_ptr<ProgramState> state_;
};

// While it lives, work put on the stream is recorded instead of run. One that ends without finish() is dropped.
class Recording {
 public:
  explicit Recording(Stream stream);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  Program finish();
  // Whether this thread records the stream.
  static bool is_open_on(Stream stream);

 private:
  Stream stream_;
  bool open_ = true;
  const Recording* before_;  // of this thread
};

}  // namespace chorale
