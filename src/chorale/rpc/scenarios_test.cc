// Scenarios of spec/rpc-and-distributed-autograd.md that take several workers and several steps: parameter servers,
// groups and agents together, references that overtake each other, remote layers before data-parallel ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <iostream>
#include <thread>

#include "chorale/base/config.h"
#include "chorale/nn/nn.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/ddp.h"
#include "chorale/rpc/context_test_util.h"
#include "chorale/rpc/distributed_optimizer.h"
#include "chorale/rpc/remote_module.h"

namespace chorale::rpc {

int64_t add_ints(int64_t a, int64_t b) { return a + b; }

// Calls another worker while it is written, and again while it is read.
struct Chatty {
  int64_t value = 0;
};
template <>
struct Codec<Chatty> {
  static constexpr size_t kLeast = 8;
  static std::string name() { return "chatty"; }
  static void write(Writer& writer, const Chatty& chatty) {
    writer.number(agent_of(*writer.core()).call<add_ints>(writer.to(), chatty.value, 1));
  }
  static Chatty read(Reader& reader) {
    const auto value = reader.number<int64_t>();
    return {agent_of(*reader.core()).call<add_ints>(reader.from(), value, 10)};
  }
};

// Takes long to write.
struct Slow {
  int64_t ms = 0;
};
template <>
struct Codec<Slow> {
  static constexpr size_t kLeast = 8;
  static std::string name() { return "slow"; }
  static void write(Writer& writer, const Slow& slow) {
    std::this_thread::sleep_for(std::chrono::milliseconds(slow.ms));
    writer.number(slow.ms);
  }
  static Slow read(Reader& reader) { return {reader.number<int64_t>()}; }
};

namespace {

using namespace std::chrono_literals;
using dist_autograd::Context;
using dist_autograd::Contexts;
using testing::HasSubstr;

void sleeps(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
int64_t value_of(const Chatty& chatty) { return chatty.value; }

// spec: test_py_nested_pickle
TEST(Scenarios, AnArgumentMayCallWhileItIsWrittenAndRead) {
  run_agents(4, for_tests({remote<add_ints>, remote<value_of>}),
             [](Agent& agent, comm::Group&) { EXPECT_EQ(agent.call<value_of>(next(agent), Chatty{100}), 111); });
}

// spec: test_all_gather_timeout
TEST(Scenarios, AGatheringNamesThoseThatAreTooLate) {
  comm::run_ranks(4, [](comm::Group& group) {
    Agent agent(group, for_tests({remote<add_ints>}));
    const std::string text =
        text_of(RpcErrorKind::kTimeout, 0, [&] { agent.all_gather(Slow{group.rank() >= 2 ? 400 : 0}, 100ms); });
    if (group.rank() == 0) {
      EXPECT_THAT(text, HasSubstr("within 0.1 s: worker2, worker3"));
    }
    EXPECT_EQ(agent.call<add_ints>(next(agent), 1, 2), 3);
    group.barrier().wait();
    agent.shutdown_now();
  });
}

// spec: test_deadlock
TEST(Scenarios, AGroupMayBeFormedAfterASlowCall) {
  run_agents(4, for_tests({remote<sleeps>}), [](Agent& agent, comm::Group& group) {
    if (group.rank() == 1) agent.call<sleeps>(0, 50);
    comm::Group other = group.new_group({0, 1, 2, 3});
    other.barrier().wait();
  });
}

// spec: test_init_pg_then_rpc, test_init_rpc_then_pg, test_pg_init_no_rpc_init
TEST(Scenarios, GroupsAndAgentsAreMadeInAnyOrder) {
  comm::run_ranks(4, [](comm::Group& group) {
    EXPECT_THROW(RRef<int64_t>().to_here(), StateError);  // no agent, no reference
    comm::Group before = group.duplicate();
    before.barrier().wait();
    Agent agent(group, for_tests({remote<add_ints>}));
    comm::Group after = group.duplicate();
    after.barrier().wait();
    EXPECT_EQ(agent.call<add_ints>(next(agent), 1, 2), 3);
    before.barrier().wait();
    agent.shutdown();
    after.barrier().wait();
  });
}

// spec: test_rpc_barrier_partial_subset
TEST(Scenarios, ABarrierOfSomeWorkersNeedsOnlyThem) {
  std::atomic<int> came{0};
  run_agents(4, for_tests({}), [&](Agent& agent, comm::Group& group) {
    if (group.rank() == 0 || group.rank() == 3) return;
    ++came;
    agent.barrier({"worker1", "worker2"});
    EXPECT_EQ(came, 2);
  });
}

// ---- a reference whose child ends before its parent is known

std::array<std::optional<RRef<Tensor>>, 4> held;
Tensor ones_plus(double x) { return add(ones({2, 2}), x); }
void hold(const RRef<Tensor>& rref) { held[static_cast<size_t>(here().info().id)] = rref; }
RRef<Tensor> held_there() { return *held[static_cast<size_t>(here().info().id)]; }
void let_go() { held[static_cast<size_t>(here().info().id)].reset(); }
Tensor ref_plus(const RRef<Tensor>& a, double x) { return add(a.to_here(), x); }

// Worker 2 makes a value on worker 0, gives it to worker 1, and gets it back from there: the owner may hear of this
// user late. A child of it on worker 3 comes and goes meanwhile.
void pass_on_and_end(Agent& agent, const std::function<void(const RRef<Tensor>& rref)>& has) {
  if (agent.info().id != 2) return;
  RRef<Tensor> rref = agent.remote<ones_plus>(0, 4);
  agent.call<hold>(1, rref);
  rref = RRef<Tensor>();
  rref = agent.call<held_there>(1);
  has(rref);
  EXPECT_EQ(agent.call<ref_plus>(3, rref, 1).to_vector<float>(), std::vector<float>(4, 6));
  agent.call<let_go>(1);
  EXPECT_EQ(rref.to_here().to_vector<float>(), std::vector<float>(4, 5));
}
const std::vector<Served> kPassedOn{remote<ones_plus>, remote<hold>, remote<held_there>, remote<let_go>,
                                    remote<ref_plus>};

// spec: x_child_dies_before_parent_known
TEST(Scenarios, AnOwnerSurvivesTheEndOfAChildWhoseParentItDoesNotKnow) {
  comm::run_ranks(4, [](comm::Group& group) {
    AgentOptions options = for_tests(kPassedOn);
    if (group.rank() == 2) options.faults.delay = {{MessageKind::kForkRequest, 150ms}};
    Agent agent(group, options);
    pass_on_and_end(agent, [](const RRef<Tensor>& rref) { EXPECT_FALSE(rref.is_confirmed()); });
    agent.barrier();
    expect_soon("nothing is left", [&] {
      const ReferenceCounts left = agent.debug().references;
      return left.owners + left.forks + left.pending_users + left.pending_children == 0;
    });
    agent.barrier();
    agent.shutdown();
  });
  run_agents_in_any_order(4, for_tests(kPassedOn),
                          [](Agent& agent, comm::Group&) { pass_on_and_end(agent, [](const RRef<Tensor>&) {}); });
}

// A user whose owner does not answer fails. What it has passed on meanwhile is good all the same.
TEST(Scenarios, AnOwnerSurvivesTheFailureOfAParentWhoseChildItDoesNotKnow) {
  comm::run_ranks(4, [](comm::Group& group) {
    AgentOptions options = for_tests(kPassedOn);
    if (group.rank() == 2) {
      options.faults.fail = {MessageKind::kForkRequest};
      options.faults.times = 100;
    }
    if (group.rank() == 3) options.faults.delay = {{MessageKind::kForkRequest, 200ms}};
    Agent agent(group, options);
    if (group.rank() == 2) {
      RRef<Tensor> rref = agent.remote<ones_plus>(0, 4);
      agent.call<hold>(1, rref);
      rref = RRef<Tensor>();
      rref = agent.call<held_there>(1);
      const auto answer = agent.call_async<ref_plus>(To(3).within(10s), rref, 1);
      agent.call<let_go>(1);
      EXPECT_EQ(answer.wait().to_vector<float>(), std::vector<float>(4, 6));
      expect_soon("it has failed", [&] {
        try {
          rref.to_here();
          return false;
        } catch (const RpcError& error) {
          return error.kind() == RpcErrorKind::kReferenceFailed;
        }
      });
    }
    agent.barrier();
    expect_soon("nothing is left", [&] {
      const ReferenceCounts left = agent.debug().references;
      return left.owners + left.forks + left.pending_users + left.pending_children == 0;
    });
    agent.barrier();
    agent.shutdown();
  });
}

// ---- parameter servers

// Answers the trainers of a round when all have come.
struct Server {
  std::mutex mutex;
  std::vector<Tensor> gradients;
  Future<Tensor> round;
  Tensor stored;
};
std::array<Server, 4> servers;
constexpr size_t kTrainers = 3;

Future<Tensor> average(const Tensor& gradient) {
  Server& own = servers[static_cast<size_t>(here().info().id)];
  std::unique_lock lock(own.mutex);
  own.gradients.push_back(gradient);
  Future<Tensor> round = own.round;
  if (own.gradients.size() < kTrainers) return round;
  Tensor sum = own.gradients[0];
  for (size_t i = 1; i < kTrainers; ++i) sum = sparse_add(sum, own.gradients[i]);
  own.stored = sum.is_sparse() ? sparse_scale(coalesce(sum), 1.0 / kTrainers) : mul(sum, 1.0 / kTrainers);
  own.gradients.clear();
  own.round = Future<Tensor>();
  const Tensor stored = own.stored;
  lock.unlock();
  round.set(stored);
  return round;
}
Tensor stored() {
  Server& own = servers[static_cast<size_t>(here().info().id)];
  const std::lock_guard lock(own.mutex);
  return own.stored;
}

// spec: test_my_parameter_server{,_sparse}
TEST(Scenarios, AServerAveragesWhatItsTrainersSend) {
  run_agents(4, for_tests({remote<average>, remote<stored>}), [](Agent& agent, comm::Group& group) {
    for (const bool sparse : {false, true}) {
      const nn::Embedding table(10, 10, {.sparse = sparse});
      for (int round = 0; round < 10; ++round) {
        std::vector<Future<Tensor>> answers;
        std::vector<int> at;
        for (int server = 0; server < 4; ++server) {
          if (server == group.rank()) continue;
          const Tensor ids = Tensor::from<int64_t>({(round + group.rank()) % 10, server}, {2});
          const Tensor weight = wanting(table.weight);
          // Two bags of two rows.
          const Tensor bags = Tensor::from<int64_t>({0, 2}, {2}), all = cat({ids, ids}, 0);
          const Tensor rows = sparse ? embedding(all, weight, {}, true) : weight;
          const Tensor picked = sparse ? arange(0, 4, 1, DType::kI64) : all;
          backward(sum(mul(embedding_bag(picked, rows, bags), group.rank() + 1)));
          answers.push_back(agent.call_async<average>(server, gradient(weight)));
          at.push_back(server);
        }
        for (size_t i = 0; i < answers.size(); ++i) {
          const Tensor got = answers[i].wait();
          EXPECT_EQ(got.is_sparse(), sparse);
          EXPECT_EQ(to_dense(got).to_vector<float>(), to_dense(agent.call<stored>(at[i])).to_vector<float>());
        }
        agent.barrier();
      }
    }
  });
}

struct BatchServer {
  std::mutex mutex;
  nn::Parameter weight;
  std::unique_ptr<optim::Sgd> optimizer;
  std::vector<Tensor> gradients;
  Future<Tensor> round;
};
std::unique_ptr<BatchServer> batch_server;

Tensor first_model() { return clone(batch_server->weight.alias()); }
Future<Tensor> update_and_fetch(const Tensor& gradient) {
  std::unique_lock lock(batch_server->mutex);
  batch_server->gradients.push_back(gradient);
  Future<Tensor> round = batch_server->round;
  if (batch_server->gradients.size() < kTrainers) return round;
  Tensor sum = batch_server->gradients[0];
  for (size_t i = 1; i < kTrainers; ++i) sum = add(sum, batch_server->gradients[i]);
  set_gradient(batch_server->weight, div(sum, static_cast<double>(kTrainers)));
  batch_server->optimizer->step();
  batch_server->gradients.clear();
  batch_server->round = Future<Tensor>();
  const Tensor model = clone(batch_server->weight.alias());
  lock.unlock();
  round.set(model);
  return round;
}

// spec: test_batch_updating_parameter_server
TEST(Scenarios, AServerUpdatesOncePerRoundOfItsTrainers) {
  std::mutex mutex;
  std::map<int, std::vector<std::vector<float>>> models;  // by round
  batch_server = std::make_unique<BatchServer>();
  batch_server->weight = nn::Parameter(pattern({30, 100}, 1));
  batch_server->optimizer = std::make_unique<optim::Sgd>(NamedTensors{{"w", batch_server->weight}},
                                                         optim::SgdOptions{.lr = 0.001, .momentum = 0.9});
  run_agents(4, for_tests({remote<first_model>, remote<update_and_fetch>}), [&](Agent& agent, comm::Group& group) {
    if (group.rank() == 0) return;  // the server
    Tensor model = agent.call<first_model>(0);
    for (int round = 0; round < 4; ++round) {
      const Tensor weight = wanting(model), x = pattern({20, 100}, 10 * round + group.rank());
      backward(mean(square(matmul(x, transpose(weight, 0, 1)))));
      model = agent.call<update_and_fetch>(0, gradient(weight));
      const std::lock_guard lock(mutex);
      models[round].push_back(model.to_vector<float>());
    }
  });
  ASSERT_EQ(models.size(), 4u);
  for (const auto& [round, all] : models) {
    ASSERT_EQ(all.size(), kTrainers);
    for (const auto& model : all) EXPECT_EQ(model, all[0]);
  }
  EXPECT_NE(models[0][0], models[3][0]);
  batch_server.reset();
}

// ---- a remote layer before a data-parallel one

struct Layer : nn::Module {
  explicit Layer(int64_t seed) : weight(pattern({5, 10}, static_cast<double>(seed))) {}
  nn::Parameter weight;
  CHORALE_MODULE(Layer, weight)
  Tensor forward(const Tensor& x) { return matmul(x, transpose(weight, 0, 1)); }
};
struct Last : nn::Module {
  nn::Parameter weight{pattern({1, 5}, 7)};
  CHORALE_MODULE(Last, weight)
  Tensor forward(const Tensor& x) { return matmul(x, transpose(weight, 0, 1)); }
};
Tensor gradient_of(uint64_t context, const RRef<Layer>& layer) {
  return static_cast<Contexts&>(here()).get(context)->gradients.gradient(layer.local_value().weight);
}
Tensor weight_of(const RRef<Layer>& layer) { return clone(layer.local_value().weight.alias()); }

class RemoteLayers : public BothModes {};
INSTANTIATE_TEST_SUITE_P(Rpc, RemoteLayers, kBothModes, name_of_mode);

// spec: test_ddp_dist_autograd_local_vs_remote
TEST_P(RemoteLayers, BeforeDataParallelOnesHaveTheGradientsOfLocalOnes) {
  std::vector<Served> serves = module_functions<Layer, int64_t>();
  serves.push_back(remote<gradient_of>);
  serves.push_back(remote<weight_of>);
  for (const char* place : {"worker0/cpu", "worker0"}) {
    run_agents(4, options(serves), [&](Agent& agent, comm::Group& group) {
      RemoteModule<Layer> far(agent, place, int64_t{group.rank()});
      Layer local(group.rank());
      set_data(local.weight, agent.call<weight_of>(0, far.module_rref()));
      parallel::DistributedDataParallel last(Last(), group);
      const Tensor x = pattern({10, 10}, group.rank());
      backward(sum(last(local.forward(x))));
      const Tensor expected_last = clone(gradient(last.module().weight)), expected_layer = gradient(local.weight);
      last.zero_grad();
      {
        Context context(agent);
        context.backward({sum(last(far.forward(x)))});
        const auto near = [](const Tensor& a, const Tensor& b) {
          const auto va = a.to_vector<double>(), vb = b.to_vector<double>();
          ASSERT_EQ(va.size(), vb.size());
          for (size_t i = 0; i < va.size(); ++i) EXPECT_NEAR(va[i], vb[i], 1e-4 * (1 + std::abs(vb[i])));
        };
        near(context.gradient(last.module().weight), expected_last);
        near(agent.call<gradient_of>(0, context.id(), far.module_rref()), expected_layer);
        agent.barrier();
      }
    });
  }
}

// ---- workers on several nodes, which tests/hosts_test.py starts with `chorale run`

Tensor sum_of_refs(const RRef<Tensor>& a, const RRef<Tensor>& b) { return add(a.to_here(), b.to_here()); }
Tensor same(const Tensor& x) { return x; }
void say(const std::string& text) { std::cout << concat("a worker says: ", text, "\n") << std::flush; }

// Something of each section of the catalogue, with a worker of the other node.
TEST(RankOfAgents, DISABLED_DoesSomethingOfEachSection) {
  comm::World world;
  world.init("env://");
  comm::Group& group = world.group();
  const int size = group.size(), far = (group.rank() + size / 2) % size, other = (group.rank() + 1) % size;
  AgentOptions options = for_tests(module_functions<Layer, int64_t>());
  add(options.serves, optimizer_functions<optim::Sgd>());
  for (const Served& one :
       {remote<add_ints>, remote<gradient_of>, remote<weight_of>, remote<sum_of_refs>, remote<same>})
    options.serves.push_back(one);
  options.faults.fail = Faults::retried();  // control messages fail three times before they are sent (B6)
  {
    Agent agent(world, options);
    // B4: calls, also with large tensors that are views, and sparse ones
    for (int64_t i = 0; i < 50; ++i) EXPECT_EQ(agent.call<add_ints>(far, i, group.rank()), i + group.rank());
    const Tensor large = narrow(pattern({1 << 10, 1 << 11}, group.rank()), 1, 3, (1 << 11) - 7);
    const Tensor back = agent.call<same>(far, large);
    EXPECT_FALSE(back.is_contiguous());
    EXPECT_TRUE(back.to_vector<float>() == large.to_vector<float>());
    const Tensor sparse = agent.call<same>(far, sparse_example());
    EXPECT_EQ(to_dense(sparse).to_vector<float>(), to_dense(sparse_example()).to_vector<float>());
    // B5: references, passed on to a third worker
    const RRef<Tensor> a = agent.remote<same>(far, pattern({3, 3}, 1)), b = agent.reference(pattern({3, 3}, 2));
    EXPECT_EQ(agent.call<sum_of_refs>(other, a, b).to_vector<float>(),
              add(pattern({3, 3}, 1), pattern({3, 3}, 2)).to_vector<float>());
    // B7, B2, B1 and B3: a remote layer before a data-parallel one, its gradients, and a step of its optimizer
    RemoteModule<Layer> layer(agent, concat("worker", far), int64_t{group.rank()});
    parallel::DistributedDataParallel last(Last(), group);
    DistributedOptimizer<optim::Sgd> optimizer(agent, layer.remote_parameters(), {.lr = 0.5});
    Layer local(group.rank());
    const Tensor x = pattern({10, 10}, group.rank());
    backward(sum(last(local.forward(x))));
    const auto expected_last = gradient(last.module().weight).to_vector<float>();
    last.zero_grad();
    {
      Context context(agent);
      context.backward({sum(last(layer.forward(x)))});
      EXPECT_EQ(context.gradient(last.module().weight).to_vector<float>(), expected_last);
      EXPECT_EQ(agent.call<gradient_of>(far, context.id(), layer.module_rref()).to_vector<float>(),
                gradient(local.weight).to_vector<float>());
      optimizer.step(context);
      EXPECT_EQ(agent.call<weight_of>(far, layer.module_rref()).to_vector<float>(),
                sub(local.weight.alias(), mul(gradient(local.weight), 0.5)).to_vector<float>());
    }
    agent.barrier();
    agent.shutdown();
  }
  say(concat("all is well over ", group.backend()));
}

Future<int64_t> never() { return {}; }

// Worker 1 ends without a word, or its node is cut off. The others learn it, and go on without it.
TEST(RankOfAgents, DISABLED_LosesAWorker) {
  comm::World world;
  world.init("env://");
  Agent agent(world, for_tests({remote<never>, remote<add_ints>}));
  const int rank = world.group().rank();
  agent.barrier();
  if (rank == 1 && config::env("WORKER_DIES")) raise(SIGKILL);
  const int lost = rank == 1 ? 0 : 1;
  const Future<int64_t> waits = agent.call_async<never>(lost);
  say("waits");
  const auto start = std::chrono::steady_clock::now();
  const std::string text = text_of(RpcErrorKind::kConnection, lost, [&] { waits.wait(); });
  EXPECT_NE(text.find(concat("'worker", lost, "'")), std::string::npos) << text;
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
  text_of(RpcErrorKind::kConnection, lost, [&] { agent.call<add_ints>(lost, 1, 2); });  // at once
  if (rank != 1) {
    EXPECT_EQ(agent.call<add_ints>(2 - rank, 1, 2), 3);
    agent.barrier({"worker0", "worker2"});
  }
  agent.shutdown_now();
  if (!HasFailure()) say(concat("worker", lost, " was missed after ", time.count(), " s"));
}

}  // namespace
}  // namespace chorale::rpc
