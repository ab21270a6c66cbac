#include "chorale/device/program.h"

#include "chorale/base/error.h"
#include "chorale/device/runtime.h"

namespace chorale {
namespace {

constinit thread_local const Recording* last_recording = nullptr;

}  // namespace

Recording::Recording(Stream stream) : stream_(stream), before_(last_recording) {
  CHORALE_CHECK(stream.handle, "[record] the CPU does its work within calls: there is nothing on a stream to record");
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
  return Program(runtime_of(stream_.device).end_recording(stream_));
}

bool Recording::is_open_on(Stream stream) {
  for (const Recording* one = last_recording; one; one = one->before_) {
    if (one->open_ && one->stream_ == stream) return true;
  }
  return false;
}

}  // namespace chorale
