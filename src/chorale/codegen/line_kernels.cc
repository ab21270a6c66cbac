#include "chorale/codegen/line_kernels.h"

#include <algorithm>
#include <cstdio>
#include <string_view>

#include "chorale/base/error.h"
#include "chorale/codegen/render.h"
#include "chorale/io/checksum.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/kernel/reduce_attrs.h"
#include "chorale/kernel/view.h"
#include "chorale/op/nn.h"

namespace chorale::codegen {
namespace {

using graph::Graph;
using graph::kNone;
using graph::Node;
using graph::Value;

// Shorter lines are less work than the calls around them; longer ones are added up as a tree by the eager loops.
constexpr int64_t kLeastLine = 8, kMostLine = 1024;

enum class LineOp : uint8_t {
  kOther,
  kSoftmax,
  kLogSoftmax,
  kSoftmaxBackward,
  kLogSoftmaxBackward,
  kLayerNorm,
  kRmsNorm,
  kSum
};

LineOp reduction_of(const Node& node) {
  if (node.kind != Node::Kind::kRow) return LineOp::kOther;
  if (node.op == &op::kSoftmax) return LineOp::kSoftmax;
  if (node.op == &op::kLogSoftmax) return LineOp::kLogSoftmax;
  if (node.op == &op::kSoftmaxBackward) return LineOp::kSoftmaxBackward;
  if (node.op == &op::kLogSoftmaxBackward) return LineOp::kLogSoftmaxBackward;
  if (node.op == &op::kLayerNorm) return LineOp::kLayerNorm;
  if (node.op == &op::kRmsNorm) return LineOp::kRmsNorm;
  if (std::string_view(node.op->name) == "sum") return LineOp::kSum;
  return LineOp::kOther;
}

bool in_order(const Value& value) {
  return value.device.type == DeviceType::kCpu && value.strides == contiguous_strides(value.sizes);
}

// What an operand is to the lines of a space.
enum class Role : uint8_t { kOther, kFull, kEvery, kLine, kOne };
Role role_in(const Value& value, const Value& space) {
  if (!in_order(value)) return Role::kOther;
  const int64_t elems = count_elems(value.sizes), n = space.sizes.back(), all = count_elems(space.sizes);
  if (value.sizes == space.sizes) return Role::kFull;
  if (elems == 1) return Role::kOne;
  if (elems == n && value.sizes.back() == n) return Role::kEvery;
  // A mean, with or without the last dimension.
  if (elems != all / n) return Role::kOther;
  const bool keeps = value.sizes.size() == space.sizes.size() && value.sizes.back() == 1;
  const bool drops = value.sizes.size() + 1 == space.sizes.size();
  if (!keeps && !drops) return Role::kOther;
  const bool leads = std::equal(value.sizes.begin(), value.sizes.begin() + static_cast<int64_t>(space.sizes.size() - 1),
                                space.sizes.begin());
  return leads ? Role::kLine : Role::kOther;
}

bool is_along_lines(const Graph& graph, const Node& node) {
  const Value& space = graph.values[node.out[0]];
  if (space.sizes.empty() || !in_order(space)) return false;
  if (space.sizes.back() < kLeastLine || space.sizes.back() > kMostLine) return false;
  return std::all_of(node.in.begin(), node.in.end(), [&](uint32_t x) {
    if (x == kNone) return false;
    const Role role = role_in(graph.values[x], space);
    // Elementwise nodes see a mean with its last dimension only: without it, it would be a weight.
    return role == Role::kFull || role == Role::kEvery || role == Role::kOne ||
           (role == Role::kLine && graph.values[x].sizes.size() == space.sizes.size());
  });
}

}  // namespace

bool reduces_lines(const Graph& graph, const Node& node) {
  const LineOp reduction = reduction_of(node);
  if (reduction == LineOp::kOther) return false;
  const Value& x = graph.values[node.in[0]];
  const auto dims = static_cast<int64_t>(x.sizes.size());
  if (dims < 1 || x.dtype != DType::kF32 || !in_order(x) || count_elems(x.sizes) == 0) return false;
  const int64_t n = x.sizes.back();
  if (n < kLeastLine || n > kMostLine) return false;
  const auto fits = [&](uint32_t v) {
    return v == kNone || (graph.values[v].dtype == DType::kF32 && in_order(graph.values[v]));
  };
  if (!std::all_of(node.in.begin(), node.in.end(), fits) || !std::all_of(node.out.begin(), node.out.end(), fits))
    return false;
  switch (reduction) {
    case LineOp::kLayerNorm:
    case LineOp::kRmsNorm:
      return node.attrs.get<kernel::LayerNormAttrs>().normalized_shape.size() == 1;
    case LineOp::kSum: {
      // Shorter ones are gathered by the eager sum, and added up in another order.
      const auto& attrs = node.attrs.get<kernel::ReduceAttrs>();
      // Without its last dimension the sum of n lines would look as a weight does.
      return dims >= 2 && n >= 16 && (attrs.keepdim || count_elems(x.sizes) != n * n) &&
             kernel::dim_mask("sum", attrs.dims, dims) == kernel::DimMask{1} << (dims - 1);
    }
    default:
      return normalize_dim("softmax", node.attrs.get<kernel::DimAttrs>().dim, dims) == dims - 1;
  }
}

const Value* space_of_lines(const Graph& graph, const Node& node) {
  if (reduces_lines(graph, node)) return &graph.values[node.in[0]];
  return node.out.size() == 1 && is_along_lines(graph, node) ? &graph.values[node.out[0]] : nullptr;
}

namespace {

const Value& space_of(const Graph& body) {
  for (const Node& node : body.nodes) {
    if (reduction_of(node) != LineOp::kOther) return body.values[node.in[0]];
  }
  CHORALE_INVARIANT(false, "[codegen] a kernel of lines without a reduction");
}

// An elementwise node as it is for one line.
Graph for_one_line(const Graph& body, const Node& node, const Value& space) {
  Graph one;
  Node copy = node;
  std::vector<uint32_t> known;
  const auto value = [&](uint32_t v) {
    Value line = body.values[v];
    const Role role = role_in(line, space);
    line.sizes = role == Role::kFull || role == Role::kEvery ? Shape{space.sizes.back()} : Shape{1};
    line.strides = contiguous_strides(line.sizes);
    return line;
  };
  for (uint32_t& x : copy.in) {
    const auto at = static_cast<size_t>(std::find(known.begin(), known.end(), x) - known.begin());
    if (at == known.size()) {
      known.push_back(x);
      one.inputs.push_back(one.add_value(value(x)));
    }
    x = static_cast<uint32_t>(at);
  }
  copy.out[0] = one.add_value(value(node.out[0]));
  one.outputs.push_back({copy.out[0]});
  one.add(std::move(copy));
  return one;
}

class LineWriter {
 public:
  explicit LineWriter(const Graph& body)
      : body_(body), space_(space_of(body)), is_outside_(body.values.size(), false) {}

  KernelText run() {
    for (size_t i = 0; i < body_.inputs.size(); ++i) point(body_.inputs[i], i, "const ");
    for (size_t o = 0; o < body_.outputs.size(); ++o) point(body_.outputs[o].value, body_.inputs.size() + o, "");
    for (const Node& node : body_.nodes) {
      for (const uint32_t y : node.out) {
        if (is_outside_[y]) continue;
        const bool full = role_in(body_.values[y], space_) == Role::kFull;
        head_ += concat("  ", c_type(body_.values[y].dtype), " v", y, "[", full ? "n" : "1", "];\n");
      }
      text_ += concat("    // ", node.name(), "\n");
      reduction_of(node) == LineOp::kOther ? add_elementwise(node) : add_reduction(node);
    }
    KernelText made;
    std::string all =
        concat(parts_, "void LINES(char* const* p, const long* a, long begin, long end) {\n  const long n = a[0];\n",
               head_, "  for (long line = begin; line < end; ++line) {\n", pointers_, text_, "  }\n}\n");
    made.name = "r" + io::sha256(all).substr(0, 16);
    for (size_t at = 0; (at = all.find("LINES", at)) != std::string::npos;) all.replace(at, 5, made.name);
    made.text = std::move(all);
    return made;
  }

 private:
  void point(uint32_t v, size_t operand, const char* qualifier) {
    const Value& value = body_.values[v];
    const Role role = role_in(value, space_);
    is_outside_[v] = true;
    const std::string type = concat(qualifier, c_type(value.dtype), "*");
    pointers_ += concat("    ", type, " v", v, " = (", type, ")p[", operand, "]",
                        role == Role::kFull   ? " + line * n"
                        : role == Role::kLine ? " + line"
                                              : "",
                        ";\n");
  }

  void add_elementwise(const Node& node) {
    const Graph one = for_one_line(body_, node, space_);
    KernelText part = render(one);
    const std::string name = concat("LINES_", count_++);
    part.text.replace(part.text.find(part.name), part.name.size(), name);
    parts_ += "INLINE " + part.text;
    std::string pointers;
    std::vector<uint32_t> operands;
    for (const uint32_t x : node.in) {
      if (std::find(operands.begin(), operands.end(), x) == operands.end()) operands.push_back(x);
    }
    operands.push_back(node.out[0]);
    for (const uint32_t x : operands) pointers += concat(pointers.empty() ? "" : ", ", "(char*)v", x);
    text_ += concat("    {\n      char* const q[] = {", pointers, "};\n      ", name, "(q, a, 0, n);\n    }\n");
  }

  std::string in(const Node& node, size_t i) const {
    return i >= node.in.size() || node.in[i] == kNone ? "0" : concat("v", node.in[i]);
  }
  void add_reduction(const Node& node) {
    const auto call = [&](const char* function, const std::string& more) {
      text_ += concat("    ", function, "(", in(node, 0), ", ", more, "n);\n");
    };
    const std::string y = concat("v", node.out[0], ", ");
    switch (reduction_of(node)) {
      case LineOp::kSoftmax:
        return call("f_line_softmax", y);
      case LineOp::kLogSoftmax:
        return call("f_line_log_softmax", y);
      case LineOp::kSoftmaxBackward:
        return call("f_line_softmax_backward", in(node, 1) + ", " + y);
      case LineOp::kLogSoftmaxBackward:
        return call("f_line_log_softmax_backward", in(node, 1) + ", " + y);
      case LineOp::kSum:
        text_ += concat("    *v", node.out[0], " = f_line_sum(", in(node, 0), ", n);\n");
        return;
      case LineOp::kLayerNorm:
      case LineOp::kRmsNorm: {
        char eps[64];
        std::snprintf(eps, sizeof eps, "%a", node.attrs.get<kernel::LayerNormAttrs>().eps);
        const bool centered = reduction_of(node) == LineOp::kLayerNorm;
        text_ += concat("    ", centered ? "f_line_layer_norm(" : "f_line_rms_norm(", in(node, 0), ", ", in(node, 1),
                        ", ", centered ? in(node, 2) + ", " : "", y,
                        centered ? concat("v", node.out[1], ", v", node.out[2]) : concat("v", node.out[1]), ", ", eps,
                        ", n);\n");
        return;
      }
      case LineOp::kOther:
        break;
    }
  }

  const Graph& body_;
  const Value& space_;
  std::vector<bool> is_outside_;  // by value
  std::string parts_, head_, pointers_, text_;
  int count_ = 0;
};

}  // namespace

KernelText render_lines(const Graph& body) { return LineWriter(body).run(); }

LineShape lines_of(const Graph& body) {
  const Value& space = space_of(body);
  return {count_elems(space.sizes) / space.sizes.back(), space.sizes.back()};
}

}  // namespace chorale::codegen
