#include "chorale/autograd/function.h"

#include <algorithm>

#include "chorale/autograd/mode.h"
#include "chorale/autograd/new_node.h"
#include "chorale/base/error.h"
#include "chorale/op/builder.h"
#include "chorale/op/creation.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"

namespace chorale {

using autograd::Edge;
using autograd::Node;
using autograd::Saved;

struct FunctionBackward final : autograd::CustomBackward {
  std::unique_ptr<Function> function;
  struct Kept {
    Saved value;
    int input = -1;   // which input it is, if any
    int output = -1;  // which output
  };
  std::vector<Kept> kept;

  const char* name() const override { return function->name(); }

  Tensors apply(Node& node, std::span<const Tensor> dout, op::InputSet needed) override {
    Function& f = *function;
    f.needed_ = needed;
    std::vector<Tensor>& unpacked = f.saved_.tensors_;
    unpacked.clear();
    for (const Kept& k : kept) {
      const Edge* edge = k.input >= 0 ? &node.edges[static_cast<size_t>(k.input)] : nullptr;
      const int position = k.input >= 0 ? k.input : k.output;
      unpacked.push_back(k.value.defined() ? k.value.unpack(node, static_cast<size_t>(std::max(position, 0)), edge)
                                           : Tensor{});
    }
    std::vector<Tensor> gradients(dout.begin(), dout.end());
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) continue;
      const TensorSpec& spec = node.outputs[i];
      gradients[i] = zeros(spec.sizes, spec.dtype, spec.device);
    }
    std::vector<Tensor> din = f.backward(gradients);
    unpacked.clear();
    CHORALE_CHECK(din.size() == node.edges.size(), "[", f.name(), "] backward returned ", din.size(), " gradients for ",
                  node.edges.size(), " inputs");
    Tensors result;
    for (size_t i = 0; i < din.size(); ++i) {
      const Edge& edge = node.edges[i];
      if (edge.wanted() && din[i].defined()) check_shape(f, i, din[i], edge);
      result.push_back(edge.wanted() ? std::move(din[i]) : Tensor{});
    }
    return result;
  }
  void release() override { kept.clear(); }

  // It may have more than the input, where that was broadcast; it must add up to the input's shape.
  static void check_shape(const Function& f, size_t i, const Tensor& gradient, const Edge& edge) {
    const Shape& sizes = edge.node ? edge.node->outputs[edge.index].sizes : edge.leaf.sizes();
    const Shape& found = gradient.sizes();
    bool fits = found.size() >= sizes.size();
    for (size_t d = 1; fits && d <= sizes.size(); ++d) {
      const int64_t mine = sizes[sizes.size() - d], its = found[found.size() - d];
      fits = mine == its || mine == 1;
    }
    CHORALE_CHECK(fits, "[", f.name(), "] backward returned a gradient of shape ", found, " for input ", i,
                  " of shape ", sizes, "; a gradient has the shape of its input");
  }
};

void SavedTensors::raise_missing(size_t i) const {
  throw StateError(
      concat("[", function_, "] saved()[", i, "] is asked for, but there are ", tensors_.size(),
             " saved tensors; forward keeps them with save_for_backward({...}), and backward alone has them"));
}

std::vector<Tensor> apply_function(std::unique_ptr<Function> function, const std::vector<Tensor>& in) {
  std::vector<Tensor> out;
  const char* name = function->name();
  function->saved_.function_ = name;
  {
    const NoGrad quiet;
    out = function->forward(in);
  }
  if (!grad_enabled()) return out;
  autograd::NewNode node;
  for (const Tensor& x : in) node.add_input(x);
  if (!node.is_wanted()) return out;
  auto backward = std::make_unique<FunctionBackward>();
  const auto position = [](const std::vector<Tensor>& list, const Tensor& x) {
    const auto found =
        std::find_if(list.begin(), list.end(), [&](const Tensor& t) { return t.defined() && x.defined() && t.is(x); });
    return found == list.end() ? -1 : static_cast<int>(found - list.begin());
  };
  for (const Tensor& x : function->to_save_) {
    FunctionBackward::Kept kept{.value = {}, .input = position(in, x), .output = position(out, x)};
    if (x.defined()) kept.value = Saved(x, kept.input < 0 && kept.output >= 0);
    backward->kept.push_back(std::move(kept));
  }
  function->to_save_.clear();
  const std::vector<Tensor> plain = std::exchange(function->non_differentiable_, {});
  for (size_t i = 0; i < out.size(); ++i) {
    op::need_defined(name, "a result of forward", out[i]);
    if (position(plain, out[i]) >= 0) {
      node.describe_output(op::spec_of(out[i]));
      continue;
    }
    // An input returned as it is must not take this node's history.
    if (position(in, out[i]) >= 0) out[i] = out[i].alias();
    node.add_output(out[i]);
  }
  backward->function = std::move(function);
  node.set_rule(std::move(backward));
  return out;
}

}  // namespace chorale
