#include "chorale/train/task.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "chorale/op/copy.h"
#include "chorale/train/checkpoint.h"

namespace chorale::train {

void Task::place(Device device) {
  device_ = device;
  const std::vector<Tensor> parameters = model().parameters();
  const bool has_memory = parameters.empty() || parameters[0].device().type != DeviceType::kNull;
  if (device != kCpu && has_memory) model().to(device);
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

NamedTensors Task::named_weights(const std::filesystem::path& folder) { return model_tensors(folder); }

NamedTensors Task::weights_from(const std::filesystem::path& folder) {
  std::map<std::string, Tensor> stored;
  for (const auto& [name, tensor] : named_weights(folder)) stored.emplace(name, tensor);
  std::unordered_map<const Tensor::Impl*, size_t> places;  // a tied weight has several names, and may be stored by any
  NamedTensors weights;
  for (const auto& [name, tensor] : model().named_parameters()) {
    const auto [place, is_new] = places.emplace(tensor.impl(), weights.size());
    if (is_new) weights.emplace_back(name, Tensor());
    Tensor& weight = weights[place->second].second;
    const auto found = stored.find(name);
    if (weight.defined() || found == stored.end()) continue;
    CHORALE_CHECK(found->second.sizes() == tensor.sizes(), "[train] ", name, " has shape ", tensor.sizes(),
                  " in the model and ", found->second.sizes(), " in ", folder.string());
    weight = found->second;
  }
  for (const auto& [name, weight] : weights)
    CHORALE_CHECK(weight.defined(), "[train] ", folder.string(), " has no weight for ", name);
  return weights;
}

void Task::draw_model() { throw InternalError("this task's model cannot be made without memory"); }

std::shared_ptr<nn::Module> Task::renew_model() {
  throw InternalError("this task's model cannot be made again without memory");
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
