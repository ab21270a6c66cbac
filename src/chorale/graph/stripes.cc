#include "chorale/graph/stripes.h"

#include <algorithm>
#include <string_view>

#include "chorale/base/error.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/kernel/reduce_attrs.h"
#include "chorale/op/copy.h"
#include "chorale/op/nn.h"
#include "chorale/op/product.h"
#include "chorale/op/view.h"

namespace chorale::graph {
namespace {

using Role = Stripes::Role;

// A stripe should stay in the second level of the cache; products want to be larger than that.
constexpr int64_t kStripeBytes = int64_t{512} << 10, kProductStripeBytes = int64_t{17} << 20;

bool is_in_order(const Value& value) { return value.strides == contiguous_strides(value.sizes); }

class Cutter {
 public:
  Cutter(const Graph& body, int64_t lines) : body_(body), roles_(body.values.size(), Role::kUnknown), lines_(lines) {}

  std::optional<Stripes> run() {
    if (lines_ <= 1) return {};
    for (const Node& node : body_.nodes) {
      if (!add(node)) return {};
    }
    Stripes stripes{roles_, lines_, 0, has_product_};
    std::vector<bool> is_view(body_.values.size(), false);
    for (const Node& node : body_.nodes) {
      if (node.kind == Node::Kind::kRow && node.op->view) is_view[node.out[0]] = true;
    }
    for (uint32_t v = 0; v < roles_.size(); ++v) {
      if (roles_[v] == Role::kLines && !is_view[v]) stripes.line_bytes += bytes_of(body_.values[v]) / lines_;
    }
    for (const Output& output : body_.outputs) {
      const Role role = roles_[output.value];
      if (is_view[output.value] || (role != Role::kLines && role != Role::kTotal)) return {};
    }
    return stripes;
  }

 private:
  const Value& value(uint32_t v) const { return body_.values[v]; }
  int64_t width(uint32_t v) const { return count_elems(value(v).sizes) / lines_; }
  bool fits(uint32_t v) const {
    return v != kNone && is_in_order(value(v)) && value(v).device.type == DeviceType::kCpu &&
           count_elems(value(v).sizes) > 0 && count_elems(value(v).sizes) % lines_ == 0;
  }
  // An operand: one from outside takes the role in which it is first read.
  bool read(uint32_t v, Role role) {
    if (v == kNone) return role == Role::kWhole;
    if (role == Role::kLines && !fits(v)) return false;
    if (roles_[v] == Role::kUnknown) roles_[v] = role;
    return roles_[v] == role;
  }
  bool make(uint32_t v, Role role) {
    if (role == Role::kLines && !fits(v)) return false;
    roles_[v] = role;
    return true;
  }
  bool is_wide_float(uint32_t v) const { return value(v).dtype == DType::kF32 || value(v).dtype == DType::kF64; }

  // Operands that look like the result are cut with it; numbers, and what is the same for each line, are not.
  bool add_elementwise(const Node& node) {
    const Value& out = value(node.out[0]);
    for (const uint32_t x : node.in) {
      if (x == kNone) return false;
      const Shape& sizes = value(x).sizes;
      const bool same = sizes == out.sizes;
      const bool repeated = count_elems(sizes) == 1 || (sizes.size() == 1 && sizes[0] == width(node.out[0]) &&
                                                        sizes[0] == out.sizes.back() && is_in_order(value(x)));
      if (!same && !repeated) return false;
      if (!read(x, same ? Role::kLines : Role::kWhole)) return false;
    }
    return std::all_of(node.out.begin(), node.out.end(),
                       [&](uint32_t y) { return value(y).sizes == out.sizes && make(y, Role::kLines); });
  }

  bool add_view(const Node& node) {
    const uint32_t x = node.in[0], y = node.out[0];
    if (node.in.size() != 1 || is_wait(node)) return false;
    if (node.op == &op::kPermute && value(x).sizes.size() == 2 && value(x).sizes[0] == lines_ &&
        is_in_order(value(x)) && value(y).sizes[1] == lines_ && value(y).strides[0] == 1) {
      return read(x, Role::kLines) && make(y, Role::kTurned);
    }
    const op::OutSpecs specs = infer(body_, node);
    return specs[0].view_of == 0 && specs[0].offset == 0 &&
           count_elems(value(x).sizes) == count_elems(value(y).sizes) && read(x, Role::kLines) && make(y, Role::kLines);
  }

  bool add_product(const Node& node) {
    has_product_ = true;
    const uint32_t y = node.out[0];
    if (node.op == &op::kLinear) {
      return read(node.in[0], Role::kLines) && read(node.in[1], Role::kWhole) && read(node.in[2], Role::kWhole) &&
             value(node.in[0]).sizes.back() == width(node.in[0]) && make(y, Role::kLines);
    }
    if (value(node.in[0]).sizes.size() != 2 || value(node.in[1]).sizes.size() != 2) return false;
    // Parts of a product are added where they lie, which would round 16 bits again and again.
    if (roles_[node.in[0]] == Role::kTurned) {
      return is_wide_float(y) && is_in_order(value(y)) && value(node.in[1]).sizes[0] == lines_ &&
             read(node.in[1], Role::kLines) && make(y, Role::kTotal);
    }
    return value(node.in[0]).sizes[0] == lines_ && read(node.in[0], Role::kLines) && read(node.in[1], Role::kWhole) &&
           make(y, Role::kLines);
  }

  bool add_sum(const Node& node) {
    const Value& x = value(node.in[0]);
    const size_t dims = x.sizes.size();
    std::vector<bool> summed(dims, false);
    if (node.attrs.get<kernel::ReduceAttrs>().dims.size() == 0) return false;
    for (const int64_t d : node.attrs.get<kernel::ReduceAttrs>().dims.span()) {
      summed[static_cast<size_t>(d < 0 ? d + static_cast<int64_t>(dims) : d)] = true;
    }
    if (dims < 2 || summed[dims - 1] || !std::all_of(summed.begin(), summed.end() - 1, [](bool s) { return s; })) {
      return false;
    }
    return is_wide_float(node.in[0]) && x.dtype == value(node.out[0]).dtype && x.sizes.back() == width(node.in[0]) &&
           read(node.in[0], Role::kLines) && make(node.out[0], Role::kTotal);
  }

  bool add_loss(const Node& node, size_t x) {
    const auto& attrs = node.attrs.get<kernel::CrossEntropyAttrs>();
    return value(node.in[x]).sizes.size() == 2 && value(node.in[x]).sizes[0] == lines_ &&
           attrs.reduction != Reduction::kNone && node.in[x + 2] == kNone && read(node.in[x], Role::kLines) &&
           read(node.in[x + 1], Role::kLines);
  }

  bool add(const Node& node) {
    if (node.kind == Node::Kind::kFused) return is_elementwise(node) && add_elementwise(node);
    if (node.kind != Node::Kind::kRow || is_collective(node)) return false;
    if (node.op->view) return add_view(node);
    if (node.op->pointwise || node.op == &op::kTo) return add_elementwise(node);
    if (node.op == &op::kLinear || node.op == &op::kMatmul) return add_product(node);
    if (std::string_view(node.op->name) == "sum") return add_sum(node);
    if (node.op == &op::kCrossEntropy) {
      return add_loss(node, 0) && make(node.out[0], Role::kTotal) && make(node.out[1], Role::kLines);
    }
    if (node.op == &op::kCrossEntropyBackward) {
      return add_loss(node, 1) && read(node.in[0], Role::kWhole) && read(node.in[4], Role::kLines) &&
             make(node.out[0], Role::kLines);
    }
    return false;
  }

  const Graph& body_;
  std::vector<Role> roles_;
  const int64_t lines_;
  bool has_product_ = false;
};

bool reads(const Node& node, uint32_t v) { return std::find(node.in.begin(), node.in.end(), v) != node.in.end(); }

}  // namespace

bool may_lie_over(const Node& fused, size_t operand) {
  if (is_elementwise(fused)) return true;
  const uint32_t x = fused.body->inputs[operand];
  bool is_logits = false;
  for (const Node& node : fused.body->nodes) {
    if (!reads(node, x)) continue;
    const bool is_backward = node.op == &op::kCrossEntropyBackward && node.in[1] == x;
    if (!is_backward && node.op != &op::kCrossEntropy) return false;
    is_logits |= is_backward;
  }
  return is_logits;
}

std::optional<Stripes> cut_into_stripes(const Graph& body, int64_t lines) { return Cutter(body, lines).run(); }

int64_t stripe_height(const Stripes& stripes) {
  const int64_t bytes = stripes.has_product ? kProductStripeBytes : kStripeBytes;
  const int64_t height = std::max<int64_t>(1, bytes / std::max<int64_t>(1, stripes.line_bytes));
  // Stripes of equal height as far as possible: a product of a few lines left over is a slow one.
  const int64_t count = (stripes.lines + height - 1) / height;
  return (stripes.lines + count - 1) / count;
}

bool is_elementwise(const Node& fused) {
  return fused.kind == Node::Kind::kFused &&
         std::all_of(fused.body->nodes.begin(), fused.body->nodes.end(), [](const Node& node) {
           return node.kind == Node::Kind::kRow && (node.op->pointwise || node.op == &op::kTo);
         });
}

}  // namespace chorale::graph
