// Modules as values: names, sharing, state, hooks. Numbers are small integers, so that results are exact.
#include "chorale/nn/module.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "chorale/nn/nn.h"
#include "chorale/testing/message_test_util.h"

namespace chorale::nn {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Net : Module {
  Linear fc1{2, 3}, fc2{3, 1, {.bias = false}};
  CHORALE_MODULE(Net, fc1, fc2)
  Tensor forward(const Tensor& x) { return fc2(relu(fc1(x))); }
};

// Every kind of member, and an own parameter listed behind a module.
struct Zoo : Module {
  std::vector<Linear> layers{Linear(1, 1), Linear(1, 1, {.bias = false})};
  std::array<Parameter, 2> scales{Parameter(ones({1})), Parameter(ones({1}))};
  std::optional<Linear> present{Linear(1, 1, {.bias = false})}, absent;
  std::unique_ptr<Net> owned = std::make_unique<Net>();
  std::shared_ptr<Linear> shared = std::make_shared<Linear>(1, 1), again = shared;
  std::map<std::string, Linear> heads{{"b", Linear(1, 1, {.bias = false})}, {"a", Linear(1, 1, {.bias = false})}};
  LayerNorm norm{1};
  Buffer table{zeros({2})}, scratch{zeros({2}), false};
  Parameter bias{zeros({1})};
  CHORALE_MODULE(Zoo, layers, scales, present, absent, owned, shared, again, heads, named("LayerNorm", norm), table,
                 scratch, bias)
  Tensor forward(const Tensor& x) { return shared->forward(x) + bias; }
};

template <class Named>
std::vector<std::string> names_of(const Named& list) {
  std::vector<std::string> names;
  names.reserve(list.size());
  for (const auto& entry : list) names.push_back(entry.first);
  return names;
}
std::vector<double> values(const Tensor& x) { return x.to_vector<double>(); }

TEST(Module, NamesComeFromMembersAndOwnTensorsComeFirst) {
  Zoo zoo;
  EXPECT_THAT(names_of(zoo.named_parameters()),
              ElementsAre("scales.0", "scales.1", "bias", "layers.0.weight", "layers.0.bias", "layers.1.weight",
                          "present.weight", "owned.fc1.weight", "owned.fc1.bias", "owned.fc2.weight", "shared.weight",
                          "shared.bias", "heads.a.weight", "heads.b.weight", "LayerNorm.weight", "LayerNorm.bias"));
  EXPECT_THAT(names_of(zoo.named_buffers()), ElementsAre("table", "scratch"));
  EXPECT_THAT(names_of(zoo.named_modules()), ElementsAre("", "layers.0", "layers.1", "present", "owned", "owned.fc1",
                                                         "owned.fc2", "shared", "heads.a", "heads.b", "LayerNorm"));
  EXPECT_EQ(zoo.parameter_count(), 2 + 1 + 3 + 1 + 12 + 2 + 2 + 2);
}

TEST(Module, StateDictHasAllNamesOfSharedTensorsAndNoScratch) {
  Zoo zoo;
  const std::vector<std::string> names = names_of(zoo.state_dict());
  EXPECT_THAT(names, ::testing::IsSupersetOf({"table", "shared.weight", "again.weight"}));
  EXPECT_THAT(names, ::testing::Not(::testing::Contains("scratch")));
  for (const auto& [name, value] : zoo.state_dict()) EXPECT_FALSE(requires_grad(value)) << name;
}

TEST(Module, LoadingCopiesIntoTheSameTensorsAndConverts) {
  Net net;
  const Tensor weight = net.fc1.weight;
  Net other;
  other.to(DType::kF64);
  net.load_state_dict(other.state_dict());
  EXPECT_TRUE(net.fc1.weight.is(weight));
  EXPECT_EQ(net.fc1.weight.dtype(), DType::kF32);
  EXPECT_EQ(values(weight), values(other.fc1.weight));
}

TEST(Module, OneErrorNamesEverythingThatDoesNotFitAndNothingIsWritten) {
  Net net;
  const auto before = values(net.fc1.bias);
  const NamedTensors state = {{"fc1.weight", zeros({3, 3})}, {"fc1.bias", zeros({3})}, {"fc3.weight", zeros({1})}};
  const std::string text = message_of<InvalidArgument>([&] { net.load_state_dict(state); });
  EXPECT_THAT(text, HasSubstr("missing (1):\n    fc2.weight"));
  EXPECT_THAT(text, HasSubstr("unexpected (1):\n    fc3.weight"));
  EXPECT_THAT(text, HasSubstr("fc1.weight: expected [3, 2], found [3, 3]"));
  EXPECT_EQ(values(net.fc1.bias), before);
  // A shape that differs is an error also when names may.
  EXPECT_THROW(net.load_state_dict(state, false), InvalidArgument);
  EXPECT_THROW(net.load_state_dict({{"fc1.bias", zeros({3})}, {"fc1.bias", zeros({3})}}, false), InvalidArgument);
}

TEST(Module, LooseLoadingReportsWhatDidNotMatch) {
  Net net;
  const LoadReport report = net.load_state_dict({{"fc1.bias", ones({3})}, {"other", zeros({1})}}, false);
  EXPECT_THAT(report.missing, ElementsAre("fc1.weight", "fc2.weight"));
  EXPECT_THAT(report.unexpected, ElementsAre("other"));
  EXPECT_THAT(values(net.fc1.bias), ElementsAre(1, 1, 1));
}

struct Tied : Module {
  Embedding table{4, 2};
  Linear head{2, 4, {.bias = false}};
  Tied() { head.weight = table.weight; }
  CHORALE_MODULE(Tied, table, head)
  Tensor forward(const Tensor& ids) { return head(table(ids)); }
};

TEST(Module, ATiedParameterIsListedOnceAndNeedsOneOfItsNames) {
  Tied tied;
  EXPECT_THAT(names_of(tied.named_parameters()), ElementsAre("table.weight"));
  EXPECT_THAT(names_of(tied.state_dict()), ElementsAre("table.weight", "head.weight"));
  tied.load_state_dict({{"head.weight", full({4, 2}, 3)}});
  EXPECT_THAT(values(tied.table.weight), ::testing::Each(3.0));
}

TEST(Module, ACopyHasTheSameTensorsAndACloneHasItsOwn) {
  Tied tied;
  Tied copy = tied;
  EXPECT_TRUE(copy.table.weight.is(tied.table.weight));
  Tied cloned = clone(tied);
  EXPECT_EQ(values(cloned.table.weight), values(tied.table.weight));
  EXPECT_FALSE(cloned.table.weight.overlaps(tied.table.weight));
  EXPECT_TRUE(cloned.head.weight.is(cloned.table.weight));
  EXPECT_TRUE(requires_grad(cloned.table.weight));
}

struct SharedPair : Module {
  std::shared_ptr<Linear> first = std::make_shared<Linear>(1, 1), second = first;
  Parameter alias = first->weight;
  CHORALE_MODULE(SharedPair, first, second, alias)
};
struct BehindBase : Module {
  std::shared_ptr<Module> layer = std::make_shared<Linear>(1, 1);
  CHORALE_MODULE(BehindBase, layer)
};

TEST(Module, CloningKeepsWhatSharedPointersShare) {
  SharedPair pair;
  pair.first->requires_grad_(false);
  SharedPair copy = clone(pair);
  EXPECT_EQ(copy.first, copy.second);
  EXPECT_NE(copy.first, pair.first);
  EXPECT_TRUE(copy.alias.is(copy.first->weight));
  EXPECT_FALSE(copy.alias.overlaps(pair.alias));
  EXPECT_FALSE(requires_grad(copy.first->bias));
  EXPECT_THROW(clone(BehindBase()), StateError);
}

TEST(Module, CanBeMovedAndKeptInVectors) {
  std::vector<Net> nets(1);
  const Tensor weight = nets[0].fc1.weight;
  for (int i = 0; i < 10; ++i) nets.emplace_back();
  EXPECT_TRUE(nets[0].fc1.weight.is(weight));
  EXPECT_EQ(nets[0](zeros({4, 2})).sizes(), (Shape{4, 1}));
}

TEST(Module, DtypeChangesUnderTheHandlesThatOthersHold) {
  Zoo zoo;
  const Tensor weight = zoo.shared->weight, tracked = zoo.table;
  backward(sum(zoo(ones({1, 1}))));
  zoo.to(DType::kBF16);
  EXPECT_EQ(weight.dtype(), DType::kBF16);
  EXPECT_EQ(gradient(weight).dtype(), DType::kBF16);
  EXPECT_EQ(tracked.dtype(), DType::kBF16);
  EXPECT_THROW(zoo.to(DType::kI32), InvalidArgument);
  BatchNorm1d norm(2);
  norm.to(DType::kF64);
  EXPECT_EQ(norm.num_batches_tracked.dtype(), DType::kI64);
}

TEST(Module, OnTheNullDeviceOnlyShapesAreLeft) {
  Net net;
  net.to(kNull);
  EXPECT_EQ(net(Tensor::empty({5, 2}, DType::kF32, kNull)).sizes(), (Shape{5, 1}));
  EXPECT_THROW(net.to(kCpu), InvalidArgument);
}

TEST(Module, TrainApplyAndGradientsReachEveryModuleOnce) {
  Zoo zoo;
  zoo.eval();
  for (const auto& [name, module] : zoo.named_modules()) EXPECT_FALSE(module->is_training()) << name;
  std::vector<std::string> order;
  zoo.owned->apply([&](Module& module) { order.emplace_back(module.type_name()); });
  EXPECT_THAT(order, ElementsAre("Linear", "Linear", "Net"));
  int calls = 0;
  zoo.apply([&](Module&) { ++calls; });
  EXPECT_EQ(calls, 11);
  backward(sum(zoo(ones({1, 1}))));
  EXPECT_THAT(values(gradient(zoo.shared->bias)), ElementsAre(1));
  zoo.zero_grad(false);
  EXPECT_THAT(values(gradient(zoo.shared->bias)), ElementsAre(0));
  zoo.zero_grad();
  EXPECT_FALSE(gradient(zoo.shared->bias).defined());
  zoo.requires_grad_(false);
  EXPECT_FALSE(requires_grad(zoo(ones({1, 1}))));
}

TEST(Module, PrintsItsTreeWithParameterCounts) {
  std::ostringstream text;
  text << Net();
  EXPECT_EQ(text.str(), "Net(\n  (fc1): Linear(2, 3)  # 9\n  (fc2): Linear(3, 1, bias=false)  # 3\n)  # 12");
}

TEST(Sequential, NamesLayersByPlaceAndRunsThemInOrder) {
  Sequential net(Linear(2, 3), ReLU(), Linear(3, 1));
  EXPECT_THAT(names_of(net.named_parameters()), ElementsAre("0.weight", "0.bias", "2.weight", "2.bias"));
  init::ones_(net.at<Linear>(0).weight);
  init::constant_(net.at<Linear>(0).bias, -4);
  init::ones_(net.at<Linear>(2).weight);
  init::constant_(net.at<Linear>(2).bias, 7);
  EXPECT_THAT(values(net(Tensor::from({1.0f, 2.0f, 2.0f, 3.0f}, {2, 2}))), ElementsAre(7, 10));
  EXPECT_THAT(message_of<StateError>([&] { net.at<Linear>(1); }), HasSubstr("layer 1 is a ReLU"));
  EXPECT_THROW(net[3], InvalidArgument);
  Sequential copy = clone(net);
  EXPECT_FALSE(copy.at<Linear>(0).weight.overlaps(net.at<Linear>(0).weight));
  EXPECT_THAT(values(copy(ones({1, 2}))), ElementsAre(7));
}

}  // namespace
}  // namespace chorale::nn
