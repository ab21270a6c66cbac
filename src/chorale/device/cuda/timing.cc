#include "chorale/device/cuda/timing.h"

#include "chorale/device/cuda/driver.h"

namespace chorale::cuda {
namespace {

struct Mark {
  Mark() { check(driver().cuEventCreate(&event, 0), "timing an algorithm"); }
  ~Mark() { driver().cuEventDestroy(event); }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  void put(Stream stream) const {
    check(driver().cuEventRecord(event, static_cast<CUstream>(stream.handle)), "timing an algorithm");
  }
  CUevent event = nullptr;
};

}  // namespace

bool is_recorded(Stream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  check(driver().cuStreamIsCapturing(static_cast<CUstream>(stream.handle), &status), "looking at a stream");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

float time_on(Stream stream, const std::function<void()>& run) {
  const Mark begun, ended;
  begun.put(stream);
  run();
  ended.put(stream);
  check(driver().cuEventSynchronize(ended.event), "timing an algorithm");
  float milliseconds = 0;
  check(driver().cuEventElapsedTime(&milliseconds, begun.event, ended.event), "timing an algorithm");
  return milliseconds;
}

}  // namespace chorale::cuda
