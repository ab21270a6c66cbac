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

// What `use` says of a module that was moved from, and of one below another.
template <class M, class Use>
void expect_moved_from(M module, const char* name, const Use& use) {
  const M taken = std::move(module);
  // NOLINTBEGIN(bugprone-use-after-move)
  const std::string expected = concat("[", name, "] the module was moved from");
  EXPECT_THAT(message_of<InvalidArgument>([&] { use(module); }), HasSubstr(expected));
  EXPECT_THAT(message_of<InvalidArgument>([&] { module.parameters(); }), HasSubstr(expected));
  EXPECT_THAT(message_of<InvalidArgument>([&] { module.state_dict(); }), HasSubstr(expected));
  EXPECT_THAT(message_of<InvalidArgument>([&] { clone(module).state_dict(); }), HasSubstr(expected));
  module = taken;
  EXPECT_NO_THROW(use(module));
  // NOLINTEND(bugprone-use-after-move)
}

// Layers, norms and losses without weights are a choice: those of a module that was moved from would go on quietly.
TEST(Module, ThatWasMovedFromIsAnError) {
  const Tensor image = ones({1, 2, 3, 3}), row = ones({1, 2});
  const auto on = [](const Tensor& x) { return [x](auto& module) { module(x); }; };
  expect_moved_from(Linear(2, 3), "Linear", on(row));
  expect_moved_from(BatchNorm2d(2), "BatchNorm2d", on(image));
  expect_moved_from(BatchNorm2d(2, {.affine = false}), "BatchNorm2d", on(image));
  expect_moved_from(InstanceNorm2d(2), "InstanceNorm2d", on(image));
  expect_moved_from(LayerNorm(2), "LayerNorm", on(row));
  expect_moved_from(RMSNorm(2), "RMSNorm", on(row));
  expect_moved_from(GroupNorm(1, 2), "GroupNorm", on(image));
  expect_moved_from(LSTM(2, 3), "LSTM", on(ones({1, 1, 2})));
  expect_moved_from(Sequential(Linear(2, 3)), "Sequential", on(row));
  expect_moved_from(CrossEntropyLoss({.weight = ones({2})}), "CrossEntropyLoss",
                    [&](auto& loss) { loss(row, zeros({1}, DType::kI64)); });
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

// ---- what CHORALE_MODULE forgot

struct Forgetful : Module {
  Linear fc1{2, 3}, fc2{3, 1};
  CHORALE_MODULE(Forgetful, fc1)
};
struct ForgetfulOfItsBase : Net {
  Linear fc3{1, 1};
  CHORALE_MODULE(ForgetfulOfItsBase, fc3)
  using Net::forward;
};
struct ForgetsParameter : Module {
  Parameter scale{ones({2, 4})}, absent;
  Linear fc{1, 1};
  CHORALE_MODULE(ForgetsParameter, fc)
};
struct Teacher : Module {
  Linear student{1, 1}, teacher{1, 1};
  std::optional<Linear> none;
  CHORALE_MODULE(Teacher, student, unlisted(teacher))
};
struct Extended : Net {
  Linear fc3{1, 1};
  CHORALE_MODULE(Extended, fc1, fc2, fc3)
};

TEST(Module, AMemberThatIsNotListedIsNamed) {
  EXPECT_THAT(message_of<StateError>([] { Forgetful().parameters(); }),
              HasSubstr("[Forgetful] has a Linear behind fc1 that its CHORALE_MODULE does not list"));
  EXPECT_THAT(message_of<StateError>([] { ForgetfulOfItsBase().state_dict(); }),
              HasSubstr("lists the members of its base too"));
  EXPECT_THAT(message_of<StateError>([] { ForgetsParameter().train(); }), HasSubstr("a Parameter f32 [2, 4]"));
  EXPECT_EQ(Extended().parameters().size(), 5u);
  // The same holds for a module inside others, and where it was moved to.
  std::vector<Forgetful> many(3);
  EXPECT_THROW(many[1].named_parameters(), StateError);
  // A member that is left out on purpose.
  Teacher teacher;
  EXPECT_EQ(teacher.parameters().size(), 2u);
  const Teacher moved = std::move(teacher);
  EXPECT_EQ(moved.parameters().size(), 2u);
}

// ---- calls

struct DoubleIt : Function {
  const char* name() const override { return "double_it"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override { return {in[0] * 2}; }
  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override { return {dout[0] * 2}; }
};
struct UsesFunction : Module {
  Linear fc{1, 1, {.bias = false}};
  CHORALE_MODULE(UsesFunction, fc)
  Tensor forward(const Tensor& x) const { return apply<DoubleIt>({fc(x)})[0]; }
};

TEST(Module, AFunctionIsAppliedInsideForwardAndTheModuleMayBeConst) {
  const UsesFunction module;
  {
    const NoGrad quiet;
    fill_(module.fc.weight, 3);
  }
  const Tensor y = module(ones({1, 1}));
  EXPECT_EQ(y.item<float>(), 6);
  backward(y);
  EXPECT_EQ(gradient(module.fc.weight).item<float>(), 2);
  UsesFunction other;
  size_t visited = 0;
  other.apply([&](Module&) { ++visited; });
  EXPECT_EQ(visited, 2u);
}

TEST(Module, AConstBatchNormEvaluatesAndDoesNotTrain) {
  BatchNorm1d norm(2);
  const BatchNorm1d& fixed = norm;
  const Tensor x = Tensor::from({1.f, 2.f, 3.f, 5.f}, {2, 2});
  EXPECT_THAT(message_of<StateError>([&] { fixed(x); }), HasSubstr("[BatchNorm1d] is in training"));
  EXPECT_EQ(norm.num_batches_tracked.item<int64_t>(), 0);
  norm.eval();
  EXPECT_EQ(fixed(x).to_vector<float>(), norm(x).to_vector<float>());
  const Sequential layers(Linear(2, 2), ReLU());
  EXPECT_EQ(layers(x).sizes(), (Shape{2, 2}));
}

struct Outer : Module {
  Sequential body{Linear(4, 4), Net()};
  CHORALE_MODULE(Outer, body)
  Tensor forward(const Tensor& x) { return body(x); }
};

TEST(Module, AShapeErrorNamesTheLayer) {
  Outer outer;
  EXPECT_THAT(message_of([&] { outer(ones({1, 4})); }), HasSubstr("in Linear(2, 3), layer body.1.fc1 of Outer"));
  EXPECT_THAT(message_of([&] { outer(ones({1, 5})); }), HasSubstr("layer body.0 of Outer"));
  EXPECT_THROW(outer(ones({1, 5})), InvalidArgument);
  EXPECT_THAT(message_of([&] { outer(to(ones({1, 4}), DType::kU8)); }), HasSubstr("to(x, DType::kF32)"));
}

TEST(Module, ThatWasMovedFromIsAnErrorOfForwardAndOfItsOwner) {
  LayerNorm norm(2);
  const LayerNorm taken = std::move(norm);
  // NOLINTBEGIN(bugprone-use-after-move)
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                norm.forward(ones({1, 2}));
              }),
              HasSubstr("[LayerNorm] the module was"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { norm.train(); }), HasSubstr("[LayerNorm] the module was moved from"));
  Outer outer;
  const auto first = std::move(outer.body.at<Linear>(0));
  EXPECT_THAT(
      message_of<InvalidArgument>([&] {
        outer(ones({1, 4}));
      }),
      HasSubstr("[Linear] the module was moved from: its parameters, buffers and layers are those of another now; in "
                "Linear, layer body.0 of Outer"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { outer.state_dict(); }), HasSubstr("[Linear] the module was moved"));
  std::ostringstream text;
  EXPECT_THAT(message_of<InvalidArgument>([&] { text << outer; }), HasSubstr("[Linear] the module was moved from"));
  EXPECT_EQ(text.str(), "");
  // NOLINTEND(bugprone-use-after-move)
}

TEST(Lstm, TakesItsStateInBraces) {
  LSTM lstm(2, 3);
  const Tensor x = ones({4, 1, 2}), h = zeros({1, 1, 3}), c = zeros({1, 1, 3});
  const auto [output, state] = lstm(x, {h, c});
  EXPECT_EQ(output.to_vector<float>(), lstm(x).output.to_vector<float>());
  EXPECT_EQ(Conv2d(1, 8, 3).weight.sizes(), (Shape{8, 1, 3, 3}));
  EXPECT_EQ(ConvTranspose1d(2, 4, 5).weight.sizes(), (Shape{2, 4, 5}));
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
