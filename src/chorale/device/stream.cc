#include "chorale/device/stream.h"

#include <vector>

#include "chorale/base/error.h"
#include "chorale/device/runtime.h"

namespace chorale {
namespace {

// The current streams of this thread; few devices, so a list.
thread_local std::vector<Stream> current_streams;

bool is_ordered_by_calls(Device device) { return device.type == DeviceType::kCpu || device.type == DeviceType::kNull; }

Stream* find_current(Device device) {
  for (Stream& stream : current_streams) {
    if (stream.device == device) return &stream;
  }
  return nullptr;
}

}  // namespace

Stream current_stream(Device device) {
  if (is_ordered_by_calls(device)) return {device};
  if (const Stream* found = find_current(device)) return *found;
  return current_streams.emplace_back(runtime_of(device).default_stream(device));
}

Stream make_stream(Device device) {
  return is_ordered_by_calls(device) ? Stream{device} : runtime_of(device).make_stream(device);
}

StreamScope::StreamScope(Stream stream) : before_(current_stream(stream.device)) {
  if (Stream* current = find_current(stream.device)) *current = stream;
}
StreamScope::~StreamScope() {
  if (Stream* current = find_current(before_.device)) *current = before_;
}

void Event::record(Stream stream) {
  device_ = stream.device;
  state_ = is_ordered_by_calls(device_) ? nullptr : runtime_of(device_).record(stream);
}

void Event::wait(Stream stream) const {
  if (!state_) return;  // one that is done may still carry an error
  if (is_ordered_by_calls(stream.device)) return state_->synchronize(Deadline::never());
  runtime_of(stream.device).wait(stream, state_);
}

bool Event::done() const { return !state_ || state_->done(); }

void Event::synchronize(Deadline deadline) const {
  if (state_) state_->synchronize(deadline);
}

void synchronize(Stream stream, Deadline deadline) { Event(stream).synchronize(deadline); }

void synchronize(Device device, Deadline deadline) {
  if (is_ordered_by_calls(device)) return;
  runtime_of(device).synchronize(device, deadline);
}

void record_stream(Device device, const void* address, Stream stream) {
  if (is_ordered_by_calls(device) || !address) return;
  runtime_of(device).allocator(device).record_stream(address, stream);
}

}  // namespace chorale
