// Streams and events, for every device alike. On the CPU, where work is done when a call returns, they cost and do
// nothing.
#pragma once

#include <chrono>
#include <memory>

#include "chorale/base/deadline.h"
#include "chorale/device/device.h"

namespace chorale {

// The stream on which this thread's calls put work for the device: its default one unless a scope says otherwise.
Stream current_stream(Device device);
// Another order of work; it lives as long as the process.
Stream make_stream(Device device);

// Makes a stream this thread's current one for its device until the scope ends. What was put on the stream before is
// not waited for: order streams by events.
class StreamScope {
 public:
  explicit StreamScope(Stream stream);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  Stream before_;
};

// A point in the order of a stream. A default-constructed one was never recorded, and is done.
class Event {
 public:
  class State;  // what a device knows of it (runtime.h)

  Event() = default;
  explicit Event(Stream stream) { record(stream); }
  // The point behind everything that is on the stream now.
  void record(Stream stream);
  // Work put on `stream` from now on begins after this point; the host does not wait.
  void wait(Stream stream) const;
  bool done() const;
  // Blocks the host. Throws what the work before it has thrown, and StateError when the deadline passes.
  void synchronize(Deadline deadline = Deadline::never()) const;

 private:
  Device device_;
  std::shared_ptr<State> state_;
};

// Blocks the host until the stream, or every stream of the device, is idle.
void synchronize(Stream stream, Deadline deadline = Deadline::never());
void synchronize(Device device, Deadline deadline = Deadline::never());

// The memory at `address`, allocated on another stream, is used on this one: it is not given to others before the work
// that is on the stream when it is freed has ended. Nothing to do on the CPU.
void record_stream(Device device, const void* address, Stream stream);

}  // namespace chorale
