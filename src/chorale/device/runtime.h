// What a kind of device brings: memory, streams, events, copies. The CPU's is there from the start; that of another
// device is added by the module that brings the device, when it is loaded. Users call stream.h.
#pragma once

#include <exception>
#include <memory>
#include <vector>

#include "chorale/base/deadline.h"
#include "chorale/device/allocator.h"
#include "chorale/device/device.h"
#include "chorale/device/stream.h"
#include "chorale/vec/strided.h"

namespace chorale {

// A point in the order of a stream. Thread-safe.
class Event::State {
 public:
  virtual ~State() = default;
  virtual bool done() const = 0;
  // Blocks the host until it is done. Throws what work before it on its stream has thrown, and StateError when
  // `deadline` passes first.
  virtual void synchronize(Deadline deadline) = 0;
};

// What a stream stands in front of until the host opens it, once. Thread-safe.
class StreamGate {
 public:
  virtual ~StreamGate() = default;
  // An error surfaces where the stream is waited for.
  virtual void open(std::exception_ptr error) = 0;
};

class ProgramState;

// Thread-safe.
class Runtime {
 public:
  virtual ~Runtime() = default;
  // How many devices of this kind there are: indices below it are valid.
  virtual int count() const = 0;
  virtual Allocator& allocator(Device device) = 0;
  // Page-locked memory of the host from and to which copies run asynchronously, and the way back. Null where there is
  // none: ordinary memory does then.
  virtual Allocator* pinned() { return nullptr; }

  virtual Stream default_stream(Device device) = 0;
  // Streams live as long as the process.
  virtual Stream make_stream(Device device) = 0;
  virtual std::shared_ptr<Event::State> record(Stream stream) = 0;
  // Work put on `stream` from now on begins after the event.
  virtual void wait(Stream stream, const std::shared_ptr<Event::State>& event) = 0;
  // The streams of all devices.
  virtual std::vector<Stream> streams() = 0;
  // Blocks the host until every stream of the device is idle; throws what their work has thrown.
  void synchronize(Device device, Deadline deadline);
  // Work put on `stream` from now on begins when the gate is open. Null where that cannot be had: a driver that waits
  // for a stream inside a call of the host (to map memory, to load a kernel) must not be kept waiting by the host.
  virtual std::shared_ptr<StreamGate> hold(Stream) { return nullptr; }

  // What is put on the stream between these two is kept, not run (program.h). StateError where a device has no such
  // thing.
  virtual void begin_recording(Stream stream);
  virtual std::unique_ptr<ProgramState> end_recording(Stream stream);

  // Copies of equal sizes and dtypes, in the order of the stream. Both sides are memory of this device or of the host;
  // host memory that is not pinned() is done with when this returns. Overwrites `to` with *value, likewise.
  virtual void copy(const vec::StridedView& from, Device from_device, const vec::StridedView& to, Device to_device,
                    Stream stream) = 0;
  virtual void fill(const void* value, const vec::StridedView& to, Stream stream) = 0;
};

// The module that drives a GPU is loaded here, when the first one is asked for. Throws StateError, saying what is there
// and what to do, when no runtime was added for that kind of device, and InvalidArgument for an index that it does not
// have.
Runtime& runtime_of(Device device);
// Null where there is none.
Runtime* find_runtime(DeviceType type);
// Called once per kind; the runtime lives as long as the process.
void add_runtime(DeviceType type, std::unique_ptr<Runtime> runtime);

}  // namespace chorale
