// The one way to make a node. Everything that records (the builder that records ops, a function that a user wrote, a
// wrapper of a module, a message from another rank) names inputs and outputs; edges, numbers and slots follow.
//
//   NewNode node;
//   for (const Tensor& x : in) node.add_input(x);
//   if (!node.is_wanted()) return;  // nothing leads to a leaf
//   node.set_rule(std::make_unique<MyBackward>());
//   for (const Tensor& y : out) node.add_output(y);
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "chorale/autograd/node.h"

namespace chorale::autograd {

class NewNode {
 public:
  NewNode() : node_(Node::make()) {}

  // The gradient of the next input goes where x came from: nowhere if x is undefined, has a dtype without gradients, or
  // leads to no leaf.
  void add_input(const Tensor& x) { add_edge(x.defined() && is_differentiable(x.dtype()) ? edge_of(x) : Edge{}); }
  void add_edge(Edge edge) {
    if (edge.node) floor_ = std::max(floor_, edge.node->number);
    wanted_ |= edge.wanted();
    node_->edges.push_back(std::move(edge));
  }
  // Whether any input wants a gradient.
  bool is_wanted() const { return wanted_; }

  // How gradients are computed; behind the last input, because the node's number is above the numbers of all of them.
  void set_rule(const op::OpDef& op, const Attrs& attrs) {
    node_->op = &op;
    node_->attrs = attrs;
    node_->number = next_number(floor_);
  }
  void set_rule(std::unique_ptr<CustomBackward> rule) {
    node_->custom = std::move(rule);
    node_->number = next_number(floor_);
  }

  // The next output is like y, which does not get this history here. Returns its index.
  uint32_t describe_output(TensorSpec y) {
    node_->outputs.push_back(std::move(y));
    return static_cast<uint32_t>(node_->outputs.size() - 1);
  }
  // The next output is y, whose history is this node from now on if it can have a gradient.
  void add_output(const Tensor& y) {
    const uint32_t index = describe_output(op::spec_of(y));
    if (is_differentiable(y.dtype())) set_history(y, node_, index);
  }

  const base::Intrusive<Node>& node() const { return node_; }
  Node* operator->() const { return node_.get(); }

 private:
  base::Intrusive<Node> node_;
  uint64_t floor_ = 0;  // the highest number among the inputs' nodes
  bool wanted_ = false;
};

}  // namespace chorale::autograd
