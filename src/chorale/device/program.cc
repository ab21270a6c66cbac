#include "chorale/device/program.h"

#include "chorale/base/error.h"
#include "chorale/device/runtime.h"
#include "chorale/device/stream_allocator.h"

namespace chorale {
namespace {

constinit thread_local const Recording* last_recording = nullptr;

}  // namespace

Recording::Recording(Stream stream) : stream_(stream), before_(last_recording) {
  CHORALE_CHECK(stream.handle, "[record] the CPU does its work within calls: there is nothing on a stream to record");
  begin_.record(stream);
  runtime_of(stream.device).begin_recording(stream);
  last_recording = this;
}
Recording::~Recording() {
  last_recording = before_;
  if (open_) runtime_of(stream_.device).end_recording(stream_);
}

Program Recording::finish() {
  CHORALE_CHECK_STATE(open_, "this recording is finished");
  open_ = false;
  return {runtime_of(stream_.device).end_recording(stream_), stream_, std::move(begin_)};
}

bool Recording::is_open_on(Stream stream) {
  for (const Recording* one = last_recording; one; one = one->before_) {
    if (one->open_ && one->stream_ == stream) return true;
  }
  return false;
}

bool Recording::hand_over(const void* address, Stream stream) {
  auto* const allocator = dynamic_cast<StreamAllocator*>(&runtime_of(stream.device).allocator(stream.device));
  return allocator && allocator->hand_over(address, stream);
}

void Program::run(Stream stream) const {
  if (!(stream == recorded_) && !begin_.done()) begin_.wait(stream);
  state_->run(stream);
}

}  // namespace chorale
