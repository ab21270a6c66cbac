// Work that is recorded once and run many times: what was put on a stream, without the cost of the calls that put it
// there.
#pragma once

#include <memory>

#include "chorale/device/device.h"
#include "chorale/device/stream.h"

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
  // Runs the program in the order of the stream, and after what was on the recorded stream when its recording began;
  // the host does not wait.
  void run(Stream stream) const;

 private:
  friend class Recording;
  Program(std::unique_ptr<ProgramState> state, Stream recorded, Event begin)
      : state_(std::move(state)), recorded_(recorded), begin_(std::move(begin)) {}
  std::unique_ptr<ProgramState> state_;
  Stream recorded_;
  Event begin_;
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
  // Gives the program memory that was allocated on the stream before: nobody else may have it before the program is
  // gone. False where it cannot be given.
  static bool hand_over(const void* address, Stream stream);

 private:
  Stream stream_;
  Event begin_;
  bool open_ = true;
  const Recording* before_;  // of this thread
};

}  // namespace chorale
