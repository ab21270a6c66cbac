#include "chorale/autograd/new_node.h"

#include <gtest/gtest.h>

#include "chorale/autograd/leaf_test_util.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"

namespace chorale::autograd {
namespace {

// Multiplies the gradient of each output by its place plus 2, and notes which inputs were asked for.
struct Scale final : CustomBackward {
  explicit Scale(std::vector<bool>& asked_for) : asked(asked_for) {}
  std::vector<bool>& asked;
  const char* name() const override { return "scale"; }
  Tensors apply(Node& node, std::span<const Tensor> dout, op::InputSet needed) override {
    Tensors din(node.edges.size());
    for (size_t i = 0; i < din.size(); ++i) {
      asked.push_back(needed.has(i));
      if (dout[i].defined()) din[i] = mul(dout[i], static_cast<double>(i) + 2);
    }
    return din;
  }
};

TEST(NewNode, GradientsGoThroughTheRuleToEveryInputThatWantsOne) {
  const Tensor a = leaf({1, 2}), plain = Tensor::from({5.0, 6.0}, {2}), b = leaf({3, 4});
  std::vector<bool> asked;
  std::vector<Tensor> out;
  NewNode node;
  for (const Tensor& x : {a, plain, b}) {
    node.add_input(x);
    out.push_back(x.alias());
  }
  ASSERT_TRUE(node.is_wanted());
  node.set_rule(std::make_unique<Scale>(asked));
  for (const Tensor& y : out) node.add_output(y);
  backward(sum(mul(out[0], 10)) + sum(mul(out[1], 100)) + sum(mul(out[2], 1000)));
  EXPECT_EQ(values(gradient(a)), (Values{20, 20}));
  EXPECT_EQ(values(gradient(b)), (Values{4000, 4000}));
  EXPECT_EQ(asked, (std::vector<bool>{true, false, true}));
}

TEST(NewNode, IsNotWantedWhereNothingLeadsToALeaf) {
  NewNode node;
  node.add_input(Tensor::from({1.0}, {1}));
  node.add_input({});
  node.add_input(Tensor::from<int64_t>({1}, {1}));
  EXPECT_FALSE(node.is_wanted());
  node.add_input(leaf({1}));
  EXPECT_TRUE(node.is_wanted());
}

TEST(NewNode, ItsNumberIsAboveThoseOfItsInputs) {
  const Tensor x = leaf({1});
  const Tensor y = mul(x, x), z = mul(y, y);
  NewNode node;
  node.add_input(z);
  node.add_input(y);
  std::vector<bool> asked;
  node.set_rule(std::make_unique<Scale>(asked));
  EXPECT_GT(node->number, edge_of(z).node->number);
  EXPECT_GT(edge_of(z).node->number, edge_of(y).node->number);
}

TEST(NewNode, AnOutputWithoutGradientHasNoHistory) {
  NewNode node;
  node.add_input(leaf({1}));
  std::vector<bool> asked;
  node.set_rule(std::make_unique<Scale>(asked));
  const Tensor index = Tensor::from<int64_t>({1}, {1}), described = Tensor::from({1.0}, {1});
  node.add_output(index);
  node.describe_output(op::spec_of(described));
  EXPECT_FALSE(requires_grad(index));
  EXPECT_FALSE(requires_grad(described));
  EXPECT_EQ(node->outputs.size(), 2u);
}

// What a message from another rank is here: it leads to no leaf of this one, and still wants its gradient.
struct Elsewhere final : CustomBackward {
  explicit Elsewhere(std::vector<Values>& sent_gradients) : sent(sent_gradients) {}
  std::vector<Values>& sent;
  const char* name() const override { return "elsewhere"; }
  bool always_runs() const override { return true; }
  Tensors apply(Node&, std::span<const Tensor> dout, op::InputSet) override {
    for (const Tensor& g : dout) sent.push_back(g.defined() ? values(g) : Values{});
    return {};
  }
};

TEST(NewNode, ARuleThatAlwaysRunsNeedsNoInput) {
  std::vector<Values> sent;
  NewNode node;
  node.set_rule(std::make_unique<Elsewhere>(sent));
  const Tensor first = Tensor::from({3.0}, {1}), second = Tensor::from({4.0}, {1}), own = leaf({7});
  node.add_output(first);
  node.add_output(second);
  backward(sum(mul(first, own)));
  EXPECT_EQ(sent, (std::vector<Values>{{7}, {}}));
  EXPECT_EQ(values(gradient(own)), (Values{3}));
}

}  // namespace
}  // namespace chorale::autograd
