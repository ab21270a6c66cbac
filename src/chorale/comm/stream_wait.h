// Inside comm: a stream of a device that waits for calls of the host's groups.
#pragma once

#include "chorale/comm/work.h"

namespace chorale::comm {

// Work put on `stream` from now on begins when `work` is done; the host does not wait. A failure of the work is one of
// the stream, and surfaces where the stream is waited for. Until then a thread of ours moves the work on. False: a
// stream of that device cannot be held (Runtime::hold; CUDA's cannot), and nothing was done.
bool hold_stream(const Work& work, Stream stream);

// The stream on which results are copied to a device. It is apart from those of callers, which may be held for that
// very copy.
Stream copy_stream(Device device);

}  // namespace chorale::comm
