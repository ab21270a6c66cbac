#include "chorale/autograd/late_root.h"

#include <gtest/gtest.h>

#include <future>
#include <optional>
#include <string>
#include <thread>

#include "chorale/autograd/advance.h"
#include "chorale/autograd/leaf_test_util.h"
#include "chorale/autograd/new_node.h"
#include "chorale/base/error.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/testing/message_test_util.h"

namespace chorale::autograd {
namespace {

using namespace std::chrono_literals;

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

Tensor tensor(std::initializer_list<double> of) { return Tensor::from(of, {static_cast<int64_t>(of.size())}); }

// Stands for a message to another rank, as it is recorded: its gradients come back later.
struct Sent final : CustomBackward {
  const char* name() const override { return "sent"; }
  Tensors apply(Node&, std::span<const Tensor> dout, op::InputSet) override { return Tensors(dout); }
};
Edge sent(const std::vector<Tensor>& tensors) {
  NewNode node;
  for (const Tensor& x : tensors) node.add_input(x);
  node.set_rule(std::make_unique<Sent>());
  for (const Tensor& x : tensors) node.describe_output(op::spec_of(x));
  return {node.node(), 0, {}};
}

// Runs in a thread of its own until the run under test sleeps or ends; what it throws is rethrown by join().
class Runner {
 public:
  explicit Runner(BackwardRun& run) : result_(std::async(std::launch::async, [&run] { run.run(); })) {}
  bool is_done() const { return result_.wait_for(0s) == std::future_status::ready; }
  void join() { result_.get(); }

 private:
  std::future<void> result_;
};

TEST(LateRoots, WhatTheyLeadToWaitsForThemAndTheRunDoesNotEndBefore) {
  const Tensor x = leaf({2, 3});
  const Tensor y = mul(x, x), z = mul(y, 10);  // z and a message share y
  const Edge message = sent({y});
  BackwardRun run({});
  LateRoot late = run.expect_root(message);
  run.add_root(sum(z), Tensor::scalar(1.0, DType::kF64));
  int finals = 0;
  std::vector<int> at_end;
  after_accumulate(x, [&](const Tensor&) { ++finals; });
  run.at_end([&] { at_end.push_back(finals); });
  Runner runner(run);
  EXPECT_FALSE(runner.is_done());
  late.deliver({tensor({100, 1000})});
  runner.join();
  EXPECT_EQ(values(gradient(x)), (Values{4 * 110, 6 * 1010}));
  EXPECT_EQ(finals, 1) << "the gradient of x is complete once";
  EXPECT_EQ(at_end, (std::vector<int>{1})) << "the end comes behind all roots";
}

TEST(LateRoots, ThatCameBeforeTheRunGiveTheSameBitsInAnyOrder) {
  // Sums that round differently in another order.
  const auto gradient_after = [](const std::vector<size_t>& order) {
    const Tensor x = leaf({1});
    const Tensor y = mul(x, 1);
    const double parts[] = {1e16, 1.0, -1e16, 3.0};
    std::vector<Edge> messages;
    messages.reserve(4);
    for (int i = 0; i < 4; ++i) messages.push_back(sent({mul(y, parts[i])}));
    BackwardRun run({});
    std::vector<LateRoot> late;
    late.reserve(messages.size());
    for (const Edge& message : messages) late.push_back(run.expect_root(message));
    std::thread deliverer([&] {
      for (size_t i : order) late[i].deliver({tensor({1})});
    });
    deliverer.join();
    run.run();
    return values(gradient(x));
  };
  const Values expected = gradient_after({0, 1, 2, 3});
  EXPECT_EQ(gradient_after({3, 2, 1, 0}), expected);
  EXPECT_EQ(gradient_after({2, 0, 3, 1}), expected);
}

TEST(LateRoots, OneMessageMayCarrySeveralTensorsAndMissSomeGradients) {
  const Tensor a = leaf({1, 2}), b = leaf({3}), c = leaf({4});
  const Edge message = sent({a, mul(b, 2), mul(c, 3)});
  BackwardRun run({});
  LateRoot late = run.expect_root(message);
  std::thread deliverer([&] { late.deliver({tensor({5, 6}), tensor({7}), Tensor{}}); });
  run.run();
  deliverer.join();
  EXPECT_EQ(values(gradient(a)), (Values{5, 6}));
  EXPECT_EQ(values(gradient(b)), (Values{14}));
  EXPECT_FALSE(gradient(c).defined());
}

TEST(LateRoots, ThatNobodyNamedBeforeHoldTheRunOpen) {
  const Tensor x = leaf({2}), other = leaf({3});
  BackwardRun run({});
  LateRoot first = run.expect_root(), second = run.expect_root();
  run.add_root(mul(x, 5), tensor({1}));
  std::promise<void> seen;
  after_accumulate(x, [&](const Tensor&) { seen.set_value(); });
  Runner runner(run);
  seen.get_future().wait();  // everything that is known has run
  EXPECT_FALSE(runner.is_done());
  first.deliver(mul(other, other), tensor({1}));
  EXPECT_FALSE(runner.is_done());
  second.withdraw();
  runner.join();
  EXPECT_EQ(values(gradient(x)), (Values{5}));
  EXPECT_EQ(values(gradient(other)), (Values{6}));
}

TEST(LateRoots, AWithdrawnOneLetsTheRestGoOn) {
  const Tensor x = leaf({2});
  const Tensor y = mul(x, x);
  const Edge message = sent({y});
  BackwardRun run({});
  LateRoot late = run.expect_root(message);
  run.add_root(mul(y, 3), tensor({1}));
  late.withdraw();
  run.run();
  EXPECT_EQ(values(gradient(x)), (Values{12}));
}

TEST(LateRoots, WhatAWithdrawnOneAloneLeadsToNeitherRunsNorIsFreed) {
  const Tensor x = leaf({2}), w = leaf({3});
  const Tensor y = mul(mul(x, x), w);
  int asked = 0;
  on_gradient(w, [&](const Tensor&) {
    ++asked;
    return Tensor();
  });
  const Edge message = sent({y});
  {
    BackwardRun run({});
    LateRoot late = run.expect_root(message);
    run.add_root(mul(x, 5), tensor({1}));
    late.withdraw();
    run.run();
  }
  EXPECT_EQ(values(gradient(x)), (Values{5}));
  EXPECT_FALSE(gradient(w).defined());
  EXPECT_EQ(asked, 0);
  backward(y, tensor({1}));  // its saved values are still there
  EXPECT_EQ(values(gradient(w)), (Values{4}));
  EXPECT_EQ(values(gradient(x)), (Values{17}));
}

TEST(LateRoots, ARunThatAdvancesDoesNotWaitForThem) {
  const Tensor x = leaf({2});
  const Edge message = sent({mul(x, x)});
  BackwardRun run({});
  LateRoot late = run.expect_root(message);
  run.add_root(mul(x, 7), tensor({1}));
  int ends = 0;
  run.at_end([&] { ++ends; });
  EXPECT_FALSE(advance(run));
  EXPECT_FALSE(advance(run));
  EXPECT_EQ(ends, 0);
  EXPECT_FALSE(gradient(x).defined());  // a part of it is still to come
  late.deliver({tensor({10})});
  EXPECT_TRUE(advance(run));
  EXPECT_EQ(ends, 1);
  EXPECT_EQ(values(gradient(x)), (Values{47}));
}

TEST(LateRoots, GoToTheSinkOfTheRun) {
  const Tensor x = leaf({2});
  GradientMap map;
  BackwardRun run({.sink = &map});
  LateRoot late = run.expect_root(sent({mul(x, 4)}));
  Runner runner(run);
  late.deliver({tensor({10})});
  runner.join();
  EXPECT_EQ(values(map.gradient(x)), (Values{40}));
  EXPECT_FALSE(gradient(x).defined());
}

struct NotesFailure final : CustomBackward {
  explicit NotesFailure(int& count) : failures(count) {}
  int& failures;
  const char* name() const override { return "notes failure"; }
  Tensors apply(Node&, std::span<const Tensor> dout, op::InputSet) override { return Tensors(dout); }
  void note_failure() override { ++failures; }
};

TEST(LateRoots, AFailureEndsTheRunWithItsError) {
  const Tensor x = leaf({2});
  int failures = 0;
  NewNode node;
  node.add_input(x);
  node.set_rule(std::make_unique<NotesFailure>(failures));
  const Tensor y = x.alias();
  node.add_output(y);
  BackwardRun run({});
  LateRoot first = run.expect_root(sent({y})), second = run.expect_root(sent({y}));
  Runner runner(run);
  first.fail(std::make_exception_ptr(StateError("worker 3 has gone")));
  EXPECT_EQ(message_of<StateError>([&] { runner.join(); }), "worker 3 has gone");
  EXPECT_EQ(failures, 1);
  EXPECT_FALSE(gradient(x).defined());
  second.deliver({tensor({1})});  // nobody waits for it any more
}

TEST(LateRoots, OneThatIsDroppedEndsTheRunToo) {
  const Tensor x = leaf({2});
  BackwardRun run({});
  { const LateRoot dropped = run.expect_root(sent({mul(x, 4)})); }
  EXPECT_TRUE(has(message_of<StateError>([&] { run.run(); }), "was dropped"));
}

TEST(LateRoots, TheDeadlineEndsTheRunAndNamesWhatIsMissing) {
  const Tensor x = leaf({2});
  BackwardRun run({.deadline = within(20ms)});
  LateRoot late = run.expect_root(sent({mul(x, 4)}));
  const std::string error = message_of<StateError>([&] { run.run(); });
  EXPECT_TRUE(has(error, "did not come in time: sent")) << error;
  late.withdraw();
}

TEST(LateRoots, MayComeWhenTheRunIsGone) {
  const Tensor x = leaf({2});
  std::optional<LateRoot> late;
  {
    BackwardRun run({});
    late.emplace(run.expect_root(sent({mul(x, 4)})));
  }
  late->deliver({tensor({1})});
  EXPECT_FALSE(gradient(x).defined());
}

TEST(LateRoots, AreCheckedWhereTheyAreDelivered) {
  const Tensor x = leaf({2, 3});
  BackwardRun run({});
  LateRoot named = run.expect_root(sent({mul(x, 4)})), open = run.expect_root();
  EXPECT_THROW(named.deliver({tensor({1})}), InvalidArgument);
  EXPECT_THROW(named.deliver({tensor({1, 2}), tensor({1, 2})}), InvalidArgument);
  EXPECT_THROW(named.deliver(mul(x, 2), tensor({1, 2})), StateError);
  EXPECT_THROW(open.deliver({tensor({1, 2})}), StateError);
  EXPECT_THROW(open.deliver(tensor({1, 2}), tensor({1, 2})), StateError);
  named.deliver({tensor({1, 2})});
  EXPECT_THROW(named.withdraw(), StateError);
  open.withdraw();
  run.run();
  EXPECT_EQ(values(gradient(x)), (Values{4, 8}));
}

TEST(LateRoots, AreTakenInTheDtypeOfTheRoot) {
  const Tensor x = leaf({2});
  BackwardRun run({});
  LateRoot late = run.expect_root(sent({mul(x, 4)}));
  late.deliver({Tensor::from<float>({3}, {1})});
  run.run();
  EXPECT_EQ(values(gradient(x)), (Values{12}));
}

}  // namespace
}  // namespace chorale::autograd
