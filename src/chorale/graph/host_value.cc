#include "chorale/graph/host_value.h"

#include <utility>

#include "chorale/graph/recording.h"

namespace chorale::graph {

int64_t HostValue::read(const char* what) const {
  if (!cell_) return 0;
  if (Recording* recording = Recording::current()) [[unlikely]]
    recording->note_host_read(cell_, what);
  return *cell_;
}

int64_t HostValue::exchange(int64_t value) {
  if (!cell_) cell_ = std::make_shared<int64_t>(value);
  if (Recording* recording = Recording::current(); recording && *cell_ != value) recording->note_host_write(cell_);
  return std::exchange(*cell_, value);
}

}  // namespace chorale::graph
