// Blocks as text.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <optional>
#include <string_view>

#include "chorale/base/error.h"
#include "chorale/codegen/block.h"
#include "chorale/codegen/render.h"
#include "chorale/graph/stripes.h"
#include "chorale/io/checksum.h"
#include "chorale/kernel/creation_attrs.h"
#include "chorale/kernel/full_like_attrs.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/kernel/reduce_attrs.h"
#include "chorale/op/copy.h"
#include "chorale/op/nn.h"
#include "chorale/op/product.h"
#include "chorale/op/update.h"

namespace chorale::codegen {

namespace {

using graph::Graph;
using graph::kNone;
using graph::Node;
using graph::Value;

constexpr int64_t kMostElems = 4096;  // elements of a value: beyond that a call costs little beside the work
// The longest line that is added up, and the most lines that are added up column by column. The eager loops of every
// processor add so few numbers in the same order.
constexpr int64_t kMostInLine = 512, kMostLines = 64;

bool is(const Node& node, std::string_view name) { return node.kind == Node::Kind::kRow && name == node.op->name; }

bool is_small(const Value& value) {
  return value.device.type == DeviceType::kCpu && count_elems(value.sizes) > 0 &&
         count_elems(value.sizes) <= kMostElems;
}
bool lies_in_order(const Value& value, DType dtype = DType::kF32) {
  return is_small(value) && value.dtype == dtype && value.strides == contiguous_strides(value.sizes);
}

// An elementwise node by itself, as a fused one.
Graph body_of_row(const Graph& graph, const Node& node) {
  Graph body;
  Node copy = node;
  std::vector<uint32_t> known;
  for (uint32_t& x : copy.in) {
    const auto at = std::find(known.begin(), known.end(), x) - known.begin();
    if (static_cast<size_t>(at) == known.size()) {
      known.push_back(x);
      body.inputs.push_back(body.add_value(graph.values[x]));
    }
    x = static_cast<uint32_t>(at);
  }
  copy.out[0] = body.add_value(graph.values[node.out[0]]);
  body.outputs.push_back({copy.out[0]});
  body.add(std::move(copy));
  return body;
}

// ---- what fits

// c = a b, with strides of a and b, as the eager product of small matrices has it.
struct Matrices {
  int64_t m, n, k, a_row, a_col, b_row, b_col;
};
std::optional<Matrices> product_of(const Graph& graph, const Node& node) {
  if (node.kind != Node::Kind::kRow || (node.op != &op::kLinear && node.op != &op::kMatmul)) return {};
  const Value &a = graph.values[node.in[0]], &b = graph.values[node.in[1]], &c = graph.values[node.out[0]];
  if (!is_small(a) || !is_small(b) || !lies_in_order(c) || a.dtype != DType::kF32 || b.dtype != DType::kF32) return {};
  if (b.sizes.size() != 2 || c.sizes.empty()) return {};
  Matrices p{};
  p.n = c.sizes.back();
  p.m = count_elems(c.sizes) / p.n;
  if (node.op == &op::kLinear) {
    if (!lies_in_order(a) || (node.in[2] != kNone && !lies_in_order(graph.values[node.in[2]]))) return {};
    p.k = b.sizes[1];
    p.a_row = p.k, p.a_col = 1, p.b_row = b.strides[1], p.b_col = b.strides[0];
  } else {
    if (a.sizes.size() != 2) return {};
    p.k = a.sizes[1];
    p.a_row = a.strides[0], p.a_col = a.strides[1], p.b_row = b.strides[0], p.b_col = b.strides[1];
  }
  // One line or one column is added up in another way.
  if (p.m == 1 || p.n == 1 || p.k == 1 || (p.b_col != 1 && p.b_row != 1)) return {};
  return p;
}

struct Columns {
  int64_t m, n;  // m = 1: everything
};
std::optional<Columns> sum_of(const Graph& graph, const Node& node) {
  if (!is(node, "sum")) return {};
  const Value& x = graph.values[node.in[0]];
  if (!lies_in_order(x) || graph.values[node.out[0]].dtype != DType::kF32) return {};
  const kernel::DimMask reduced =
      kernel::dim_mask("sum", node.attrs.get<kernel::ReduceAttrs>().dims, static_cast<int64_t>(x.sizes.size()));
  const int64_t elems = count_elems(x.sizes), count = kernel::reduced_count(x.sizes, reduced);
  if (count == elems) return elems <= kMostInLine ? std::optional<Columns>({1, elems}) : std::nullopt;
  if (x.sizes.size() != 2 || reduced != 1 || x.sizes[0] == 1) return {};
  const int64_t m = x.sizes[0], n = x.sizes[1], wide = std::max<int64_t>(1, 64 / n);
  return n >= 8 && m / wide < kMostLines ? std::optional<Columns>({m, n}) : std::nullopt;
}

// Operands of a loss or of its gradient: logits are number `x`, targets the next one.
bool is_loss(const Graph& graph, const Node& node, size_t x) {
  const auto& attrs = node.attrs.get<kernel::CrossEntropyAttrs>();
  const Value &logits = graph.values[node.in[x]], &target = graph.values[node.in[x + 1]];
  return attrs.reduction != Reduction::kNone && attrs.label_smoothing == 0 && node.in[x + 2] == kNone &&
         logits.sizes.size() == 2 && lies_in_order(logits) && logits.sizes[1] <= kMostInLine &&
         logits.sizes[0] <= kMostInLine && lies_in_order(target, DType::kI64);
}

// An update of f32 parameters: operands of one place lie alike.
bool is_update(const Graph& graph, const Node& node) {
  if (!is(node, "update_adam") && !is(node, "update_sgd")) return false;
  const op::Lists lists = node.op->lists(node.attrs);
  if (node.in[1] != kNone || (is(node, "update_adam") && node.attrs.get<AdamRule>().amsgrad)) return false;
  const DType lr = graph.values[node.in[0]].dtype;
  if (lr != DType::kF32 && lr != DType::kF64) return false;
  const size_t n = (node.in.size() - lists.own) / lists.count;
  for (size_t i = 0; i < n; ++i) {
    const Value& parameter = graph.values[node.in[2 + i]];
    for (size_t l = 0; l < lists.count; ++l) {
      const Value& x = graph.values[node.in[2 + l * n + i]];
      if (l == 2 ? !lies_in_order(x, DType::kI64) : !lies_in_order(x) || x.sizes != parameter.sizes) return false;
    }
  }
  return true;
}

bool is_filled(const Graph& graph, const Node& node) {
  return (is(node, "full") || is(node, "full_like")) && lies_in_order(graph.values[node.out[0]]);
}

bool is_view(const Graph& graph, const Node& node) {
  if (node.kind != Node::Kind::kRow || !node.op->view || node.op->cpu) return false;
  const op::OutSpecs specs = infer(graph, node);
  return std::all_of(specs.begin(), specs.end(), [](const op::OutSpec& spec) { return spec.view_of == 0; });
}

bool is_elementwise(const Graph& graph, const Node& node) {
  Lanes lanes = Lanes::kAny;
  if (node.kind == Node::Kind::kRow) return can_render(graph, node, lanes);
  return graph::is_elementwise(node);
}

// ---- text

std::string number(double value, bool is_f32) {
  if (!std::isfinite(value))
    return std::isnan(value) ? "__builtin_nan(\"\")" : value < 0 ? "-__builtin_inf()" : "__builtin_inf()";
  char text[64];
  std::snprintf(text, sizeof text, is_f32 ? "%af" : "%a",
                is_f32 ? static_cast<double>(static_cast<float>(value)) : value);
  return text;
}
std::string f32(double value) { return std::isfinite(value) ? number(value, true) : "(float)" + number(value, true); }
std::string f64(double value) { return number(value, false); }

constexpr std::string_view kName = "BLOCK";  // until the text is known, from which the name follows

class Writer {
 public:
  explicit Writer(const Graph& body) : body_(body), is_outside_(body.values.size(), false) {}

  KernelText run() {
    for (size_t i = 0; i < body_.inputs.size(); ++i) point(body_.inputs[i], i, "const ");
    for (size_t o = 0; o < body_.outputs.size(); ++o) point(body_.outputs[o].value, body_.inputs.size() + o, "");
    for (const Node& node : body_.nodes) {
      if (is_view(body_, node)) {
        show(node);
        continue;
      }
      for (const uint32_t y : node.out) {
        if (is_outside_[y]) continue;
        const Value& value = body_.values[y];
        head_ += concat("  ", c_type(value.dtype), " v", y, "[", count_elems(value.sizes),
                        "] __attribute__((aligned(64)));\n");
      }
      text_ += concat("  // ", node.name(), "\n");
      add(node);
    }
    std::string all = concat(parts_, "long ", kName, "(char* const* p) {\n", head_, checks_, text_, "  return 0;\n}\n");
    KernelText made;
    made.name = "b" + io::sha256(all).substr(0, 16);
    for (size_t at = 0; (at = all.find(kName, at)) != std::string::npos;) all.replace(at, kName.size(), made.name);
    made.text = std::move(all);
    return made;
  }

 private:
  const Value& value(uint32_t v) const { return body_.values[v]; }
  static std::string v(uint32_t number) { return concat("v", number); }

  void point(uint32_t number, size_t operand, const char* qualifier) {
    const char* type = c_type(value(number).dtype);
    is_outside_[number] = true;
    head_ += concat("  ", qualifier, type, "* v", number, " = (", qualifier, type, "*)p[", operand, "];\n");
  }
  void show(const Node& node) {
    const op::OutSpecs specs = infer(body_, node);
    for (size_t i = 0; i < node.out.size(); ++i) {
      head_ += concat("  const ", c_type(value(node.out[i]).dtype), "* v", node.out[i], " = v", node.in[0], " + ",
                      specs[i].offset, ";  // ", node.name(), "\n");
    }
  }

  void add(const Node& node) {
    if (const auto p = product_of(body_, node)) return add_product(node, *p);
    if (const auto columns = sum_of(body_, node)) return add_sum(node, *columns);
    if (node.kind == Node::Kind::kRow && node.op == &op::kCrossEntropy) return add_loss(node);
    if (node.kind == Node::Kind::kRow && node.op == &op::kCrossEntropyBackward) return add_loss_gradient(node);
    if (is(node, "update_adam")) return add_adam(node);
    if (is(node, "update_sgd")) return add_sgd(node);
    if (is_filled(body_, node)) return add_filled(node);
    if (node.kind == Node::Kind::kRow) return add_elementwise(body_of_row(body_, node), node);
    add_elementwise(*node.body, node);
  }

  void add_elementwise(const Graph& body, const Node& node) {
    KernelText part = render(body);
    const std::string name = concat(kName, "_", count_++);
    part.text.replace(part.text.find(part.name), part.name.size(), name);
    parts_ += "INLINE " + part.text;
    const Loops loops = loops_of(body);
    std::string numbers, pointers;
    for (const int64_t size : loops.sizes) numbers += concat(numbers.empty() ? "" : ", ", size);
    for (const std::vector<int64_t>& strides : loops.strides) {
      for (const int64_t stride : strides) numbers += concat(", ", stride);
    }
    std::vector<uint32_t> operands;
    for (const uint32_t x : node.in) {
      // A row may read a value twice, and its body has it once.
      if (node.kind != Node::Kind::kRow || std::find(operands.begin(), operands.end(), x) == operands.end())
        operands.push_back(x);
    }
    operands.insert(operands.end(), node.out.begin(), node.out.end());
    for (const uint32_t x : operands) pointers += concat(pointers.empty() ? "" : ", ", "(char*)v", x);
    const int64_t count = loops.sizes.size() == 1 ? loops.sizes[0] : loops.elems / loops.sizes.back();
    text_ += concat("  {\n    static const long a[] = {", numbers, "};\n    char* const q[] = {", pointers, "};\n    ",
                    name, "(q, a, 0, ", count, ");\n  }\n");
  }

  void add_product(const Node& node, const Matrices& p) {
    const bool has_bias = node.op == &op::kLinear && node.in[2] != kNone;
    std::string b = v(node.in[1]);
    int64_t b_row = p.b_row;
    if (p.b_col != 1) {
      const std::string turned = concat("t", count_++);
      head_ += concat("  float ", turned, "[", p.k * p.n, "] __attribute__((aligned(64)));\n");
      text_ += concat("  f_transpose(", b, ", ", p.n, ", ", p.k, ", ", p.b_col, ", ", turned, ");\n");
      b = turned;
      b_row = p.n;
    }
    text_ += concat("  f_product(", p.m, ", ", p.n, ", ", p.k, ", v", node.in[0], ", ", p.a_row, ", ", p.a_col, ", ", b,
                    ", ", b_row, ", v", node.out[0], ", ", has_bias ? v(node.in[2]) : "0", ");\n");
  }

  void add_sum(const Node& node, const Columns& columns) {
    if (columns.m == 1) {
      text_ += concat("  *v", node.out[0], " = f_line_sum(v", node.in[0], ", ", columns.n, ");\n");
    } else {
      text_ += concat("  f_column_sums(v", node.in[0], ", ", columns.m, ", ", columns.n, ", v", node.out[0], ");\n");
    }
  }

  struct LossText {
    std::string target, sizes;
    std::string divisor;
  };
  LossText check_targets(const Node& node, size_t x) {
    const auto& attrs = node.attrs.get<kernel::CrossEntropyAttrs>();
    const Value& logits = value(node.in[x]);
    LossText loss{v(node.in[x + 1]), concat(logits.sizes[0], ", ", logits.sizes[1], ", ", attrs.ignore_index, "L"),
                  "1.0"};
    const std::string check = concat("  if (!targets_fit(", loss.target, ", ", loss.sizes, ")) return 1;\n");
    if (checks_.find(check) == std::string::npos) checks_ += check;
    if (attrs.reduction == Reduction::kMean) {
      loss.divisor = concat("targets_that_count(", loss.target, ", ", logits.sizes[0], ", ", attrs.ignore_index, "L)");
    }
    return loss;
  }
  void add_loss(const Node& node) {
    const LossText loss = check_targets(node, 0);
    const int64_t lines = value(node.in[0]).sizes[0];
    text_ += concat("  {\n    float losses[", lines, "];\n    f_losses(v", node.in[0], ", ", loss.target, ", ",
                    loss.sizes, ", losses, v", node.out[1], ");\n    *v", node.out[0],
                    " = (float)((double)f_line_sum(losses, ", lines, ") / ", loss.divisor, ");\n  }\n");
  }
  void add_loss_gradient(const Node& node) {
    const LossText loss = check_targets(node, 1);
    text_ += concat("  f_loss_gradient(v", node.in[1], ", ", loss.target, ", ", loss.sizes, ", v", node.in[4],
                    ", (float)((double)*v", node.in[0], " / ", loss.divisor, "), v", node.out[0], ");\n");
  }

  void add_filled(const Node& node) {
    const Scalar number =
        is(node, "full") ? node.attrs.get<kernel::FullAttrs>().value : node.attrs.get<kernel::FullLikeAttrs>().value;
    text_ += concat("  for (long i = 0; i < ", count_elems(value(node.out[0]).sizes), "; ++i) v", node.out[0],
                    "[i] = ", f32(number.real()), ";\n");
  }

  // Numbers of a step, which parameters mostly share, then each parameter: `rates` computes what follows from the step.
  // The gradient that was made first comes first: one that was just stored in short lines cannot be loaded in long ones
  // before it has reached the cache.
  template <class Each>
  void add_update(const Node& node, const std::string& names, const std::string& rates, const Each& each) {
    const size_t n = (node.in.size() - 2) / node.op->lists(node.attrs).count;
    text_ += concat("  {\n    double lr = *v", node.in[0], ", ", names, ";\n    i64 last = 0;\n");
    std::vector<size_t> order(n);
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return node.in[2 + n + a] < node.in[2 + n + b]; });
    for (const size_t i : order) {
      const auto in = [&](size_t list) { return v(node.in[2 + list * n + i]); };
      const auto out = [&](size_t list) { return v(node.out[list * n + i]); };
      const std::string step = concat("step", i);
      text_ += concat("    i64 ", step, " = *", in(2), " + 1;\n    *", out(1), " = ", step, ";\n    if (", step,
                      " != last) {\n      double t = last = ", step, ";\n", rates, "    }\n    ",
                      each(in, out, count_elems(value(node.in[2 + i]).sizes)));
    }
    text_ += "  }\n";
  }
  void add_adam(const Node& node) {
    const auto& o = node.attrs.get<AdamRule>();
    const std::string rates =
        concat("      rate = lr / (1 - __builtin_pow(", f64(o.beta1), ", t));\n      root_scale = 1 / ",
               "__builtin_sqrt(1 - __builtin_pow(", f64(o.beta2), ", t));\n");
    const std::string decay = f64(o.weight_decay), keep = o.decoupled ? concat("1 - lr * ", decay) : "1";
    add_update(node, "rate, root_scale", rates, [&](const auto& in, const auto& out, int64_t elems) {
      return concat("f_adam(", in(0), ", ", in(1), ", ", in(3), ", ", in(4), ", ", out(0), ", ", out(2), ", ", out(3),
                    ", ", elems, ", ", o.maximize ? "-1" : "1", ", ", o.decoupled ? "0" : decay, ", ", keep, ", rate, ",
                    f64(1 - o.beta1), ", ", f64(o.beta2), ", ", f64(1 - o.beta2), ", root_scale, ", f64(o.eps), ");\n");
    });
  }
  void add_sgd(const Node& node) {
    const auto& o = node.attrs.get<SgdRule>();
    const std::string rates = concat("      gain = t == 1 ? 1 : ", f64(1 - o.dampening), ";\n");
    add_update(node, "gain", rates, [&](const auto& in, const auto& out, int64_t elems) {
      const bool moves = o.momentum != 0;
      return concat("f_sgd(", in(0), ", ", in(1), ", ", moves ? in(3) : "0", ", ", out(0), ", ", moves ? out(2) : "0",
                    ", ", elems, ", ", o.maximize ? "-1" : "1", ", ", f64(o.weight_decay), ", lr, ", f64(o.momentum),
                    ", gain, ", o.nesterov ? 1 : 0, ");\n");
    });
  }

  const Graph& body_;
  std::vector<bool> is_outside_;  // by value
  std::string parts_, head_, checks_, text_;
  int count_ = 0;
};

}  // namespace

bool fits_block(const Graph& graph, const Node& node) {
  if (node.kind != Node::Kind::kRow && node.kind != Node::Kind::kFused) return false;
  if (is_view(graph, node)) return true;
  if (!std::all_of(node.out.begin(), node.out.end(), [&](uint32_t y) { return is_small(graph.values[y]); }))
    return false;
  if (is_elementwise(graph, node)) return true;
  if (node.kind != Node::Kind::kRow) return false;
  if (node.op == &op::kCrossEntropy) return is_loss(graph, node, 0);
  if (node.op == &op::kCrossEntropyBackward) {
    return is_loss(graph, node, 1) && graph.values[node.in[0]].dtype == DType::kF32 &&
           lies_in_order(graph.values[node.in[4]], DType::kF64);
  }
  return product_of(graph, node) || sum_of(graph, node) || is_update(graph, node) || is_filled(graph, node);
}

KernelText render_block(const Graph& body) { return Writer(body).run(); }

}  // namespace chorale::codegen
