#include "chorale/device/program.h"

#include "chorale/base/error.h"
#include "chorale/device/runtime.h"

namespace chorale {

Recording::Recording(Stream stream) : stream_(stream) {
  CHORALE_CHECK(stream.handle, "[record] the CPU does its work within calls: there is nothing on a stream to record");
  runtime_of(stream.device).begin_recording(stream);
}
Recording::~Recording() {
  if (open_) runtime_of(stream_.device).end_recording(stream_);
}

Program Recording::finish() {
  CHORALE_CHECK_STATE(open_, "this recording is finished");
  open_ = false;
  return Program(runtime_of(stream_.device).end_recording(stream_));
}

}  // namespace chorale
