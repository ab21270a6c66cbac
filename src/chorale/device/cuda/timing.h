// How long work takes on a stream, for choices among a library's algorithms.
#pragma once

#include <functional>

#include "chorale/device/device.h"

namespace chorale::cuda {

// Whether what is put on the stream is recorded (device/program.h): then nothing runs, and nothing can be timed.
bool is_recorded(Stream stream);
// Milliseconds that the device takes for what `run` puts on the stream. The host waits for it.
float time_on(Stream stream, const std::function<void()>& run);

}  // namespace chorale::cuda
