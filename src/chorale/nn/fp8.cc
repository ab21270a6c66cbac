#include "chorale/nn/fp8.h"

#include <algorithm>
#include <set>

#include "chorale/base/error.h"
#include "chorale/nn/module.h"

namespace chorale::nn {

std::vector<std::string> use_fp8(Module& model, const std::vector<std::string>& except) {
  const NamedModules modules = model.named_modules();
  for (const std::string& name : except) {
    CHORALE_CHECK(std::any_of(modules.begin(), modules.end(), [&](const auto& row) { return row.first == name; }),
                  "[use_fp8] the model has no layer ", name,
                  "; its members have the names of its state dict, without "
                  "the last part");
  }
  std::set<std::string> own;  // weights under their first names
  for (const auto& [name, parameter] : model.named_parameters()) own.insert(name);
  std::vector<std::string> found;
  for (const auto& [name, module] : modules) {
    auto* const layer = dynamic_cast<TakesFp8*>(module);
    if (!layer || !own.contains(name.empty() ? "weight" : name + ".weight") ||
        std::find(except.begin(), except.end(), name) != except.end())
      continue;
    layer->set_fp8(true);
    found.push_back(name);
  }
  CHORALE_CHECK(!found.empty(), "[use_fp8] ", model.type_name(), " has no layer that could multiply in 8 bits");
  return found;
}

}  // namespace chorale::nn
