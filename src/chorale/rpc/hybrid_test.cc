// Data-parallel training inside distributed autograd (spec/rpc-and-distributed-autograd.md, B1): four trainers, a
// worker that holds an embedding table and a layer, and a master that tells the trainers what to do.
#include <gtest/gtest.h>

#include "chorale/nn/nn.h"
#include "chorale/parallel/ddp.h"
#include "chorale/rpc/context_test_util.h"
#include "chorale/rpc/remote_module.h"

namespace chorale::rpc {
namespace {

using dist_autograd::Context;
using dist_autograd::Mode;
using parallel::DistributedDataParallel;

constexpr int kTrainers = 4, kRemote = 4, kMaster = 5;

// All ones, but -1 at [0][0].
nn::Parameter signed_ones(int64_t rows, int64_t columns) {
  const Tensor x = ones({rows, columns});
  x.data<float>()[0] = -1;
  return nn::Parameter(x);
}
struct Dense : nn::Module {
  Dense(int64_t in, int64_t out) : weight(signed_ones(out, in)) {}
  nn::Parameter weight;
  CHORALE_MODULE(Dense, weight)
  Tensor forward(const Tensor& x) { return matmul(x, transpose(weight, 0, 1)); }
};
struct Table : nn::Module {
  nn::Parameter weight{full({2, 3}, 0.5, DType::kF32)};
  CHORALE_MODULE(Table, weight)
  Tensor forward(const Tensor& ids, const Tensor& offsets) { return embedding_bag(ids, weight, offsets); }
};
struct RemoteNet : nn::Module {
  Dense fc{5, 3};
  CHORALE_MODULE(RemoteNet, fc)
  Tensor forward(const Tensor& x) { return relu(fc(x)); }
};

// Which part of a trainer's model is data-parallel.
enum class Ddp : uint8_t { kNone, kOutside, kInside };

struct Remote {
  RemoteModule<Table> table;
  RemoteModule<RemoteNet> net;
};

// fc2 is a Dense, or one that is data-parallel.
template <class Last>
struct Hybrid : nn::Module {
  Hybrid(Remote parts, Last layer) : remote(std::move(parts)), fc2(std::move(layer)) {}
  Remote remote;
  Dense fc1{2, 2};
  Last fc2;
  void visit_members(nn::MemberVisitor& visitor) override {
    nn::visit_member(visitor, "fc1", fc1);
    nn::visit_member(visitor, "fc2", static_cast<nn::Module&>(*fc2));
  }
  CHORALE_MODULE_CALL(Hybrid)
  Tensor forward(const Tensor& xy, const Tensor& ids, const Tensor& offsets) {
    const Tensor sparse = remote.table.forward(ids, offsets);
    const Tensor dense = fc1(xy);
    return (*fc2)(remote.net.forward(cat({dense, sparse}, 1)));
  }
};
using Plain = Hybrid<std::shared_ptr<Dense>>;
using WithInside = Hybrid<std::shared_ptr<DistributedDataParallel<Dense>>>;

// Examples of a trainer: [4, 2], ids [4], value of each.
struct Examples {
  std::vector<float> xy;
  std::vector<int64_t> ids;
  float value = 0;
};
Examples examples_of(int trainer) {
  std::vector<Examples> all;
  for (float value : {-1.f, 1.f}) {
    for (float x : {-value, value}) {
      Examples own{{}, {}, value};
      for (float y : {value, -value}) {
        for (int64_t z : {0, 1}) {
          own.xy.insert(own.xy.end(), {x, y});
          own.ids.push_back(z);
        }
      }
      all.push_back(own);
    }
  }
  return all.at(static_cast<size_t>(trainer));
}

struct Step {
  Tensor outputs, loss, fc1, fc2, table, net;
  bool own_gradients = false;  // of any parameter, here or on the remote worker
  CHORALE_MESSAGE(Step, outputs, loss, fc1, fc2, table, net, own_gradients)
};

// What a trainer is; ranks are threads of one process.
struct Trainer {
  comm::Group* world = nullptr;
  comm::Group group;
  std::optional<Plain> plain;
  std::optional<WithInside> with_inside;
  std::optional<DistributedDataParallel<Plain>> outside;

  const Tensor& fc1() {
    return plain ? plain->fc1.weight : with_inside ? with_inside->fc1.weight : outside->module().fc1.weight;
  }
  const Tensor& fc2() {
    return plain ? plain->fc2->weight : with_inside ? with_inside->fc2->module().weight : outside->module().fc2->weight;
  }
};
std::array<Trainer*, 6> trainers{};
Trainer& own_trainer() { return *trainers[static_cast<size_t>(here().info().id)]; }

void set_up(int64_t kind, const RemoteModule<Table>& table, const RemoteModule<RemoteNet>& net) {
  Trainer& own = own_trainer();
  own.group = own.world->new_group({0, 1, 2, 3});
  const Remote remote{table, net};
  switch (static_cast<Ddp>(kind)) {
    case Ddp::kNone:
      own.plain.emplace(remote, std::make_shared<Dense>(3, 1));
      break;
    case Ddp::kOutside:
      own.outside.emplace(Plain(remote, std::make_shared<Dense>(3, 1)), own.group);
      break;
    case Ddp::kInside:
      own.with_inside.emplace(remote, std::make_shared<DistributedDataParallel<Dense>>(Dense(3, 1), own.group));
      break;
  }
}

struct RemoteGradients {
  Tensor table, net;
  bool own = false;
  CHORALE_MESSAGE(RemoteGradients, table, net, own)
};
RemoteGradients remote_gradients(uint64_t context, const RRef<Table>& table, const RRef<RemoteNet>& net) {
  autograd::GradientMap& gradients = static_cast<dist_autograd::Contexts&>(here()).get(context)->gradients;
  const Tensor &t = table.local_value().weight, &n = net.local_value().fc.weight;
  return {gradients.gradient(t), gradients.gradient(n), gradient(t).defined() || gradient(n).defined()};
}

// One context over some of the trainer's examples; the loss has all of its values.
Step run_step(size_t first, size_t count) {
  Agent agent = here();
  Trainer& own = own_trainer();
  const Examples all = examples_of(agent.info().id);
  const auto rows = static_cast<int64_t>(count);
  const Tensor xy = Tensor::from<float>(std::span(all.xy).subspan(2 * first, 2 * count), {rows, 2});
  const Tensor ids = Tensor::from<int64_t>(std::span(all.ids).subspan(first, count), {rows});
  const Tensor offsets = arange(0, rows, 1, DType::kI64);
  Context context(agent);
  Step step;
  step.outputs = own.plain         ? (*own.plain)(xy, ids, offsets)
                 : own.with_inside ? (*own.with_inside)(xy, ids, offsets)
                                   : (*own.outside)(xy, ids, offsets);
  step.loss = sum(mul(step.outputs, full({4}, all.value, DType::kF32)));
  context.backward({step.loss});
  step.outputs = step.outputs.alias();
  step.loss = step.loss.alias();
  step.fc1 = context.gradient(own.fc1());
  step.fc2 = context.gradient(own.fc2());
  const Remote& remote = own.plain         ? own.plain->remote
                         : own.with_inside ? own.with_inside->remote
                                           : own.outside->module().remote;
  const RemoteGradients there =
      agent.call<remote_gradients>(kRemote, context.id(), remote.table.module_rref(), remote.net.module_rref());
  step.table = there.table;
  step.net = there.net;
  step.own_gradients = there.own || gradient(own.fc1()).defined() || gradient(own.fc2()).defined();
  return step;
}
Step train() { return run_step(0, 4); }
std::vector<Step> train_unevenly() {
  Trainer& own = own_trainer();
  std::vector<Step> steps;
  parallel::join({&*own.outside}, {}, [&] {
    for (size_t batch = 0; batch < (here().info().id < 2 ? 1u : 2u); ++batch) steps.push_back(run_step(2 * batch, 2));
  });
  return steps;
}

std::vector<Served> functions() {
  std::vector<Served> list = module_functions<Table>();
  for (const auto& more : {module_functions<RemoteNet>(), context_functions()}) {
    list.insert(list.end(), more.begin(), more.end());
  }
  list.insert(list.end(), {remote<set_up>, remote<train>, remote<train_unevenly>, remote<remote_gradients>});
  return list;
}

// The table of the catalogue: what a trainer has before any averaging.
struct Expected {
  std::vector<float> outputs, loss, fc1, fc2, net, table;
};
Expected expected_of(int trainer) {
  const std::vector<float> net0{-16, 16, 8, 8, 8, 0, -16, -4, -4, -4, 0, -16, -4, -4, -4},
      net1{0, 0, 0, 0, 0, -16, 0, -4, -4, -4, -16, 0, -4, -4, -4};
  const auto negative = [](std::vector<float> x) {
    for (float& value : x) value = -value;
    return x;
  };
  switch (trainer) {
    case 0:
      return {{-3.5, -3.5, 3.5, 3.5}, {0}, {-32, -16, 0, -16}, {-56, -28, -28}, net0, std::vector<float>(6, 0)};
    case 1:
      return {{0, 0, 7, 7}, {-56}, {16, -16, 16, -16}, {0, -28, -28}, net1, std::vector<float>(6, -8)};
    case 2:
      return {{7, 7, 0, 0}, {56}, {-16, 16, -16, 16}, {0, 28, 28}, negative(net1), std::vector<float>(6, 8)};
    default:
      return {{3.5, 3.5, -3.5, -3.5}, {0}, {32, 16, 0, 16}, {56, 28, 28}, negative(net0), std::vector<float>(6, 0)};
  }
}
std::vector<float> values(const Tensor& x) { return x.defined() ? x.to_vector<float>() : std::vector<float>{}; }

class HybridModel : public testing::TestWithParam<Mode> {
 protected:
  // `master` runs on the master when the trainers are ready; trainers and the remote worker only serve.
  static void run(Ddp kind, const std::function<void(Agent&)>& master) {
    AgentOptions options = for_tests(functions());
    options.backward = GetParam();
    comm::run_ranks(6, [&](comm::Group& group) {
      Trainer own;
      own.world = &group;
      trainers[static_cast<size_t>(group.rank())] = &own;
      Agent agent(group, options);
      if (group.rank() == kMaster) {
        const RemoteModule<Table> table(agent, concat("rank:", kRemote));
        const RemoteModule<RemoteNet> net(agent, concat("rank:", kRemote));
        std::vector<Future<void>> ready;
        ready.reserve(kTrainers);
        for (int trainer = 0; trainer < kTrainers; ++trainer)
          ready.push_back(agent.call_async<set_up>(trainer, static_cast<int64_t>(kind), table, net));
        group.new_group({0, 1, 2, 3});  // collective over all six
        wait_all(ready);
        master(agent);
      } else if (group.rank() == kRemote) {
        group.new_group({0, 1, 2, 3});
      }
      agent.barrier();
      own.plain.reset();
      own.with_inside.reset();
      own.outside.reset();
      agent.shutdown();
    });
  }
  static std::vector<Step> train_all(Agent& agent) {
    std::vector<Future<Step>> steps;
    steps.reserve(kTrainers);
    for (int trainer = 0; trainer < kTrainers; ++trainer) steps.push_back(agent.call_async<train>(trainer));
    return wait_all(steps);
  }
  static void expect_common(const Step& step, const Expected& expected) {
    EXPECT_EQ(values(step.outputs), expected.outputs);
    EXPECT_EQ(values(step.loss), expected.loss);
    // Remote layers are never averaged: a context has its own trainer's gradients.
    EXPECT_EQ(values(step.table), expected.table);
    EXPECT_EQ(values(step.net), expected.net);
    EXPECT_FALSE(step.own_gradients);
  }
};
INSTANTIATE_TEST_SUITE_P(Rpc, HybridModel, kBothModes, name_of_mode);

// spec: test_backward_no_ddp, x_remote_grads_per_context
TEST_P(HybridModel, WithoutDdpHasTheGradientsOfEachTrainer) {
  run(Ddp::kNone, [](Agent& agent) {
    for (int round = 0; round < 3; ++round) {
      const auto steps = train_all(agent);
      for (int trainer = 0; trainer < kTrainers; ++trainer) {
        const Step& step = steps[static_cast<size_t>(trainer)];
        const Expected expected = expected_of(trainer);
        expect_common(step, expected);
        EXPECT_EQ(values(step.fc1), expected.fc1);
        EXPECT_EQ(values(step.fc2), expected.fc2);
      }
    }
  });
}

// spec: test_backward_ddp_outside
TEST_P(HybridModel, WithDdpOutsideHasAverages) {
  run(Ddp::kOutside, [](Agent& agent) {
    for (int round = 0; round < 3; ++round) {
      const auto steps = train_all(agent);
      for (int trainer = 0; trainer < kTrainers; ++trainer) {
        const Step& step = steps[static_cast<size_t>(trainer)];
        expect_common(step, expected_of(trainer));
        EXPECT_EQ(values(step.fc1), (std::vector<float>{0, 0, 0, 0}));
        EXPECT_EQ(values(step.fc2), (std::vector<float>{0, 0, 0}));
      }
    }
  });
}

// spec: test_backward_ddp_inside
TEST_P(HybridModel, WithDdpInsideHasAveragesOfThatLayerOnly) {
  run(Ddp::kInside, [](Agent& agent) {
    for (int round = 0; round < 3; ++round) {
      const auto steps = train_all(agent);
      for (int trainer = 0; trainer < kTrainers; ++trainer) {
        const Step& step = steps[static_cast<size_t>(trainer)];
        const Expected expected = expected_of(trainer);
        expect_common(step, expected);
        EXPECT_EQ(values(step.fc1), expected.fc1);
        EXPECT_EQ(values(step.fc2), (std::vector<float>{0, 0, 0}));
      }
    }
  });
}

// spec: test_backward_ddp_outside_uneven_inputs
TEST_P(HybridModel, TrainersMayRunOutOfInputs) {
  run(Ddp::kOutside, [](Agent& agent) {
    std::vector<Future<std::vector<Step>>> calls;
    calls.reserve(kTrainers);
    for (int trainer = 0; trainer < kTrainers; ++trainer) calls.push_back(agent.call_async<train_unevenly>(trainer));
    const auto steps = wait_all(calls);
    for (int trainer = 0; trainer < kTrainers; ++trainer) {
      const auto& own = steps[static_cast<size_t>(trainer)];
      ASSERT_EQ(own.size(), trainer < 2 ? 1u : 2u);
      EXPECT_EQ(values(own[0].fc1), (std::vector<float>{0, 12, 0, 4}));
      EXPECT_EQ(values(own[0].fc2), (std::vector<float>{0, 14, 14}));
      if (trainer < 2) continue;
      EXPECT_EQ(values(own[1].fc1), (std::vector<float>{2, -2, -2, 2}));
      EXPECT_EQ(values(own[1].fc2), (std::vector<float>{7, 0, 0}));
    }
  });
}

}  // namespace
}  // namespace chorale::rpc
