#include "chorale/api/piece_backward.h"

#include <algorithm>
#include <map>

#include "chorale/autograd/autograd.h"
#include "chorale/base/error.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"

namespace chorale::compiled {

using graph::kNone;

Tensors PieceBackward::apply(autograd::Node&, std::span<const Tensor> dout, op::InputSet) {
  const Segment::Piece& its = segment->pieces()[piece];
  CHORALE_CHECK_STATE(!autograd::mode.grad,
                      "[compile] a compiled graph can be differentiated once; call the function itself, not the "
                      "compiled one, where second derivatives are wanted");
  std::map<uint32_t, Tensor> by_value;
  for (size_t i = 0; i < saved.size(); ++i) {
    CHORALE_CHECK_STATE(saved[i].storage()->version() == versions[i], "[backward of a compiled graph] needs a value (",
                        saved[i].dtype(), " ", saved[i].sizes(), ") that was overwritten in place by ",
                        saved[i].storage()->last_writer() ? saved[i].storage()->last_writer() : "a write",
                        "; clone it before the write, or write out of place");
    by_value[its.saved[i]] = saved[i];
  }
  // Values first: they may be of a recording that is going on.
  for (const Tensor& tangent : dout) {
    const Tensor& part = part_of(tangent);
    if (part.defined() && part.is_traced()) part.need_bytes("the backward of a compiled graph");
  }
  const graph::RecordingPaused paused;
  for (size_t i = 0; i < dout.size(); ++i) {
    const TensorSpec& spec = its.outputs[i];
    const std::optional<Whole>& whole = its.tangent_wholes[i];
    const Tensor tangent = whole && dout[i].defined() ? part_of_gradient(dout[i], *whole) : dout[i];
    by_value[its.tangents[i]] = tangent.defined()
                                    ? contiguous(to(tangent, spec.dtype))
                                    : zeros(whole ? whole->part_sizes() : spec.sizes, spec.dtype, spec.device);
  }
  std::vector<Tensor> in, out(its.backward.out.size());
  for (const uint32_t value : its.backward.in) in.push_back(by_value.at(value));
  if (!its.backward.out.empty()) segment->run_backward(piece, in, out, sizes);
  Tensors gradients(its.gradients.size());
  for (size_t i = 0; i < its.gradients.size(); ++i) {
    if (its.gradients[i] == kNone) continue;
    // Where no gradient arrives none leaves: zeros would make a parameter look used.
    // One that depends on none (a rule that gives zeros) leaves in any case.
    const std::vector<bool>& reached = its.reached_by[i];
    bool is_reached = std::none_of(reached.begin(), reached.end(), [](bool at) { return at; });
    for (size_t root = 0; root < dout.size(); ++root) is_reached |= reached[root] && dout[root].defined();
    if (!is_reached) continue;
    const auto at = std::find(its.backward.out.begin(), its.backward.out.end(), its.gradients[i]);
    const Tensor& gradient = out[static_cast<size_t>(at - its.backward.out.begin())];
    gradients[i] = its.gradient_wholes[i] ? its.gradient_wholes[i]->around(gradient) : gradient;
  }
  return gradients;
}

std::vector<std::vector<bool>> reached_by(const Segment::Piece& piece) {
  const graph::Graph& backward = piece.backward.graph;
  std::vector<std::vector<bool>> by_value(backward.values.size(), std::vector<bool>(piece.tangents.size(), false));
  for (size_t i = 0; i < backward.inputs.size(); ++i) {
    for (size_t root = 0; root < piece.tangents.size(); ++root) {
      if (piece.backward.in[i] == piece.tangents[root]) by_value[backward.inputs[i]][root] = true;
    }
  }
  for (const graph::Node& node : backward.nodes) {
    for (const uint32_t x : node.in) {
      if (x == kNone) continue;
      for (const uint32_t y : node.out) {
        for (size_t root = 0; root < piece.tangents.size(); ++root) {
          if (by_value[x][root]) by_value[y][root] = true;
        }
      }
    }
  }
  std::vector<std::vector<bool>> result;
  for (const uint32_t gradient : piece.gradients) {
    const auto at = std::find(piece.backward.out.begin(), piece.backward.out.end(), gradient);
    result.push_back(gradient == kNone
                         ? std::vector<bool>(piece.tangents.size(), false)
                         : by_value[backward.outputs[static_cast<size_t>(at - piece.backward.out.begin())].value]);
  }
  return result;
}

}  // namespace chorale::compiled
