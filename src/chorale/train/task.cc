#include "chorale/train/task.h"

#include <fmt/format.h>

#include <algorithm>

#include "chorale/op/copy.h"
#include "chorale/train/checkpoint.h"

namespace chorale::train {

void Task::place(Device device) {
  device_ = device;
  if (device != kCpu) model().to(device);
}

data::Example Task::here(const data::Example& batch) const {
  return device_ == kCpu ? batch : data::Example{to(batch.x, device_), to(batch.y, device_)};
}

void Task::start_from(const std::filesystem::path& folder) {
  try {
    model().load_state_dict(model_tensors(folder));
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(concat(error.what(), " (from ", folder.string(), ")"));
  }
}

void Task::show_whole(const NamedTensors* state) { CHORALE_INVARIANT(!state, "this task's model cannot be split"); }

std::string text_of(const Metrics& metrics) {
  std::string text;
  for (const auto& [key, value] : metrics) {
    std::string name = key;
    std::replace(name.begin(), name.end(), '_', ' ');
    if (!text.empty()) text += "  ";
    text += name.ends_with("accuracy") ? fmt::format("{} {:.2f} %", name, value * 100)
                                       : fmt::format("{} {:.3f}", name, value);
  }
  return text;
}

}  // namespace chorale::train
