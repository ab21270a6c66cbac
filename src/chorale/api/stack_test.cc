// The stack of Builders: order, scopes, and what is recorded of it.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "chorale/api/api.h"
#include "chorale/op/builder.h"

namespace chorale {
namespace {

using Names = std::vector<std::string>;

// Writes down what passes, and hands it on. Lives on when its scope has ended, as `keep` asks.
class Watcher final : public op::Builder, public std::enable_shared_from_this<Watcher> {
 public:
  explicit Watcher(op::Place place = op::Place::kSharding) : Builder(place) {}
  void call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
            op::Rest rest) override {
    seen.push_back(op.name);
    attributes.push_back(attrs);
    rest.call(op, in, attrs, out);
  }
  void call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                 op::Rest rest) override {
    seen.push_back(std::string(op.name) + "_");
    rest.call_into(op, in, attrs, out);
  }
  Tensor draw(Generator& generator, int64_t words, Device device, op::Rest rest) override {
    seen.push_back("draw");
    return rest.draw(generator, words, device);
  }
  void set_data(const Tensor& x, const Tensor& other, op::Rest rest) override {
    seen.push_back("set_data");
    rest.set_data(x, other);
  }
  std::shared_ptr<Builder> keep() override { return shared_from_this(); }

  Names seen;
  std::vector<Attrs> attributes;
};

TEST(Stack, BuildersStandAtTheirPlacesWhateverTheOrderOfScopes) {
  const auto sharding = std::make_shared<Watcher>(), other = std::make_shared<Watcher>();
  const op::Stack base = op::current_stack().without(op::Place::kSharding);
  const op::Stack stack = base.with(*sharding);
  EXPECT_EQ(stack.at(op::Place::kSharding), sharding.get());
  EXPECT_EQ(stack.at(op::Place::kAutograd), base.at(op::Place::kAutograd));
  EXPECT_EQ(stack.at(op::Place::kBottom), base.at(op::Place::kBottom));
  EXPECT_EQ(stack.at(op::Place::kAutocast), nullptr);
  EXPECT_TRUE(stack.without(op::Place::kSharding).all() == base.all());
  EXPECT_FALSE(stack.all() == base.all());
  // One at each place: the later one replaces the earlier.
  EXPECT_EQ(stack.with(*other).at(op::Place::kSharding), other.get());
  // The upper places first, though they are put there last.
  const op::Stack made{base.at(op::Place::kBottom), other.get(), base.at(op::Place::kAutograd)};
  EXPECT_TRUE(made.all() == base.with(*other).all());
}

TEST(Stack, AScopeEndsWhereItEnds) {
  const auto watcher = std::make_shared<Watcher>();
  const Tensor x = ones({2});
  {
    const op::Under scope(op::current_stack().with(*watcher));
    (void)neg(x);
  }
  (void)abs(x);
  EXPECT_EQ(watcher->seen, (Names{"neg"}));
}

TEST(Stack, EverythingThatMakesOrMovesATensorPassesThroughIt) {
  const auto watcher = std::make_shared<Watcher>();
  const op::Under scope(op::current_stack().with(*watcher));
  const Tensor x = ones({2});
  watcher->seen.clear();
  const Tensor same = detach(x);
  set_data(x, same);
  (void)uniform({3});
  add_(x, x);
  EXPECT_EQ(watcher->seen, (Names{"detach", "set_data", "draw", "uniform", "add_"}));
}

TEST(Stack, AGradientRuleRunsUnderWhatItWasRecordedUnder) {
  const auto watcher = std::make_shared<Watcher>();
  const Tensor w = set_requires_grad(full({2}, 0.5));
  Tensor y;
  {
    const op::Under scope(op::current_stack().with(*watcher));
    y = sum(tanh(w));
  }
  const Tensor outside = sum(exp(w));  // recorded without it
  watcher->seen.clear();
  backward(y);
  EXPECT_NE(std::find(watcher->seen.begin(), watcher->seen.end(), "tanh_backward"), watcher->seen.end());
  watcher->seen.clear();
  backward(outside);
  EXPECT_EQ(watcher->seen, Names{});
}

TEST(Stack, AGradientRuleRunsBelowAutocastWhereverBackwardIsCalled) {
  const auto watcher = std::make_shared<Watcher>();
  const Tensor w = set_requires_grad(full({2, 2}, 0.5)), x = full({2, 2}, 1.0);
  const Tensor y = sum(matmul(x, w));
  {
    const Autocast scope(DType::kBF16);
    const op::Under watched(op::current_stack().with(*watcher));
    backward(y);
  }
  for (const std::string& name : watcher->seen) EXPECT_NE(name, "to");
  EXPECT_EQ(gradient(w).to_vector<float>(), (std::vector<float>{2, 2, 2, 2}));
}

TEST(Stack, AttributesOfTwoDropoutsAreEqualAndTheirStretchesAreNot) {
  const auto watcher = std::make_shared<Watcher>();
  const op::Under scope(op::current_stack().with(*watcher));
  const Tensor x = ones({64});
  watcher->seen.clear();
  watcher->attributes.clear();
  const Tensor first = dropout(x, 0.5), second = dropout(x, 0.5);
  EXPECT_EQ(watcher->seen, (Names{"draw", "dropout", "draw", "dropout"}));
  ASSERT_EQ(watcher->attributes.size(), 2u);
  EXPECT_EQ(watcher->attributes[0], watcher->attributes[1]);
  EXPECT_NE(first.to_vector<float>(), second.to_vector<float>());
}

// A write to what detach() gives is no part of the history of its input, but counted.
TEST(Detach, HasNoHistoryAndSharesTheBytes) {
  const Tensor w = set_requires_grad(full({2}, 3.0));
  const Tensor y = square(w), seen = detach(y);
  EXPECT_FALSE(requires_grad(seen));
  EXPECT_EQ(seen.raw(), y.raw());
  fill_(seen, 7);
  EXPECT_EQ(y.to_vector<float>(), (std::vector<float>{7, 7}));
  backward(sum(y));
  EXPECT_EQ(gradient(w).to_vector<float>(), (std::vector<float>{6, 6}));
}

}  // namespace
}  // namespace chorale
