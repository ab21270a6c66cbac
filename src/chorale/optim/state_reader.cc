#include "chorale/optim/state_reader.h"

#include <algorithm>

namespace chorale::optim {
namespace {

std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kShown = 8;
  if (names.empty()) return "nothing";
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) text += (i ? ", " : "") + names[i];
  return names.size() > kShown ? concat(text, " and ", names.size() - kShown, " more") : text;
}

}  // namespace

StateReader::StateReader(const char* reader, const std::vector<std::pair<std::string, Tensor>>& state)
    : reader_(reader), state_(state.begin(), state.end()) {}

double StateReader::number(const std::string& key) {
  const Tensor found = tensor(key, Shape{});
  return found.defined() ? found.item<double>() : 0;
}

Tensor StateReader::tensor(const std::string& key, const Shape& sizes) {
  const auto found = state_.find(key);
  if (found == state_.end()) {
    missing_.push_back(key);
    return {};
  }
  wanted_.insert(key);
  CHORALE_CHECK(found->second.defined() && found->second.sizes() == sizes, "[", reader_, "] ", key,
                " in the state to load should have shape ", sizes, ", and ",
                found->second.defined() ? concat("has ", found->second.sizes()) : "is undefined");
  return found->second;
}

void StateReader::finish() const {
  std::vector<std::string> unexpected;
  for (const auto& [key, tensor] : state_) {
    if (!wanted_.contains(key)) unexpected.push_back(key);
  }
  CHORALE_CHECK(missing_.empty() && unexpected.empty(), "[", reader_,
                "] the state to load was saved with other parameters, options or by another class; missing: ",
                listed(missing_), "; unexpected: ", listed(unexpected));
}

}  // namespace chorale::optim
