#include "chorale/graph/products.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/op/kernels.h"
#include "chorale/op/product.h"
#include "chorale/vec/scalar_ops.h"

namespace chorale::graph {
namespace {

using kernel::cpu::Epilogue;
using kernel::cpu::Product;
using kernel::cpu::ProductForm;

Epilogue epilogue_of(const Node& node) {
  if (node.kind != Node::Kind::kRow || !node.op->pointwise) return Epilogue::kNone;
  switch (node.op->pointwise->op) {
    case vec::ScalarOp::kRelu:
      return Epilogue::kRelu;
    case vec::ScalarOp::kGeluErf:
      return Epilogue::kGeluErf;
    case vec::ScalarOp::kGeluTanh:
      return Epilogue::kGeluTanh;
    default:
      return Epilogue::kNone;
  }
}

bool lies_in_rows(const Value& value) { return value.strides == contiguous_strides(value.sizes); }

}  // namespace

bool is_plain_product(const Graph& graph, const Node& node) {
  if (node.kind != Node::Kind::kRow || (node.op != &op::kLinear && node.op != &op::kMatmul)) return false;
  const Value &a = graph.values[node.in[0]], &b = graph.values[node.in[1]], &c = graph.values[node.out[0]];
  if (c.dtype != DType::kF32 || c.device.type != DeviceType::kCpu || b.sizes.size() != 2) return false;
  if (count_elems(c.sizes) == 0 || a.sizes.back() == 0 || !lies_in_rows(c)) return false;
  if (node.op == &op::kLinear) return lies_in_rows(a) && lies_in_rows(b);
  return a.sizes.size() == 2;
}

bool is_epilogue(const Node& node) { return epilogue_of(node) != Epilogue::kNone; }

bool is_product(const Node& fused) {
  if (fused.kind != Node::Kind::kFused) return false;
  const std::vector<Node>& nodes = fused.body->nodes;
  return (nodes.size() == 1 || (nodes.size() == 2 && is_epilogue(nodes[1]))) && is_plain_product(*fused.body, nodes[0]);
}

FusedKernel product_kernel(const Node& fused, ProductForm form) {
  const Node& node = fused.body->nodes[0];
  const Epilogue epilogue = fused.body->nodes.size() == 2 ? epilogue_of(fused.body->nodes[1]) : Epilogue::kNone;
  const bool is_linear = node.op == &op::kLinear;
  // Operands of the fused node may stand in another order than those of the product, or twice.
  const auto place = [&](uint32_t value) {
    const std::vector<uint32_t>& inputs = fused.body->inputs;
    return static_cast<size_t>(std::find(inputs.begin(), inputs.end(), value) - inputs.begin());
  };
  const bool has_bias = is_linear && node.in[2] != kNone;
  const size_t a = place(node.in[0]), b = place(node.in[1]), bias = has_bias ? place(node.in[2]) : 0;
  return [=](std::span<const Tensor> in, std::span<Tensor> out) {
    const Tensor &x = in[a], &y = in[b], &c = out[0];
    const int64_t n = c.size(-1), k = x.size(-1);
    const kernel::cpu::ProductFormScope scope(form);
    kernel::cpu::product({.dtype = DType::kF32,
                          .m = c.elems() / n,
                          .n = n,
                          .k = k,
                          .a = x.impl()->data,
                          .b = y.impl()->data,
                          .c = c.impl()->data,
                          .a_row = is_linear ? k : x.stride(0),
                          .a_col = is_linear ? 1 : x.stride(1),
                          .b_row = is_linear ? 1 : y.stride(0),
                          .b_col = is_linear ? k : y.stride(1),
                          .c_row = n,
                          .c_col = 1,
                          .bias = has_bias ? in[bias].impl()->data : nullptr,
                          .epilogue = epilogue});
  };
}

Node fuse_product(const Graph& graph, const std::vector<const Node*>& members) {
  auto body = std::make_shared<Graph>();
  std::vector<uint32_t> number(graph.values.size(), kNone);
  Node fused;
  fused.kind = Node::Kind::kFused;
  fused.origin = members.back()->origin;
  fused.out = members.back()->out;
  for (const uint32_t x : members[0]->in) {
    if (x == kNone || number[x] != kNone) continue;
    fused.in.push_back(x);
    body->inputs.push_back(number[x] = body->add_value(graph.values[x]));
  }
  for (const Node* member : members) {
    Node copy = *member;
    for (uint32_t& x : copy.in) x = x == kNone ? kNone : number[x];
    const uint32_t y = copy.out[0];
    copy.out[0] = number[y] = body->add_value(graph.values[y]);
    body->add(std::move(copy));
  }
  body->outputs.push_back({number[fused.out[0]]});
  fused.body = std::move(body);
  return fused;
}

}  // namespace chorale::graph
