#include "chorale/nn/call.h"

#include <typeinfo>

#include "chorale/nn/module.h"

namespace chorale::nn::detail {
namespace {

// An error of a bad value that knows the layer in which it was raised. Every module that it passes on its way out knows
// a longer path to that layer.
class LayerError final : public InvalidArgument {
 public:
  LayerError(std::string text, const Module* layer, std::string description, const std::string& place)
      : InvalidArgument(concat(text, "; in ", description, place)),
        text_(std::move(text)),
        layer_(layer),
        description_(std::move(description)) {}
  const std::string& text() const { return text_; }
  const Module* layer() const { return layer_; }
  const std::string& description() const { return description_; }

 private:
  std::string text_;
  const Module* layer_;  // to compare with, not to look at: it may be gone
  std::string description_;
};

std::string describe_layer(const Module& module) {
  try {
    return concat(module.type_name(), "(", module.describe(), ")");
  } catch (const Error&) {
    return module.type_name();  // a layer that was moved from cannot describe itself
  }
}

}  // namespace

void raise_in_layer(const Module& module, const InvalidArgument& error) {
  if (typeid(error) == typeid(InvalidArgument)) throw LayerError(error.what(), &module, describe_layer(module), "");
  if (const auto* inner = dynamic_cast<const LayerError*>(&error)) {
    for (const auto& [name, member] : const_cast<Module&>(module).named_modules()) {
      if (member == inner->layer() && !name.empty())
        throw LayerError(inner->text(), inner->layer(), inner->description(),
                         concat(", layer ", name, " of ", module.type_name()));
    }
  }
  throw;
}

}  // namespace chorale::nn::detail
