// Optimizers over several workers, and modules on them (spec/rpc-and-distributed-autograd.md, B3 and B7).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "chorale/base/generator.h"
#include "chorale/nn/nn.h"
#include "chorale/optim/optim.h"
#include "chorale/optim/rprop.h"
#include "chorale/rpc/context_test_util.h"
#include "chorale/rpc/distributed_optimizer.h"
#include "chorale/rpc/remote_module.h"

namespace chorale::rpc {
namespace {

using dist_autograd::Context;
using testing::HasSubstr;
using Kind = RpcErrorKind;

Tensor first_weight(uint64_t seed) {
  Generator generator(seed);
  return uniform({3, 3}, 0, 1, DType::kF32, generator);
}
// w · x.
struct Weight : nn::Module {
  nn::Parameter w;
  CHORALE_MODULE(Weight, w)
  Weight(uint64_t seed, bool wanted) : w(first_weight(seed)) { set_requires_grad(w, wanted); }
  Tensor forward(const Tensor& x) { return matmul(w, x); }
};

Tensor weight_now(const RRef<Weight>& module) { return clone(module.local_value().w.alias()); }

struct Failing final : optim::OptimizerOf<optim::SgdOptions> {
  Failing(const NamedTensors& parameters, const optim::SgdOptions& options) : OptimizerOf("Failing") {
    CHORALE_CHECK(options.lr < 1, "simulated constructor error");
    add_groups({{parameters, options}});
  }
  void check(const Attrs&) const override {}
  StateNames states(const Attrs&) const override { return {}; }
  void update(const UpdateLists&, const Attrs&) const override {
    const int whose = caller().id;
    // One of two owners throws later than the other.
    if ((whose + 2) % 4 == here().info().id) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ++updates[static_cast<size_t>(whose)];
    throw StateError("simulated step error");
  }
  static inline std::array<std::atomic<int>, 4> updates{};  // begun by each worker
};

std::vector<Served> functions() {
  std::vector<Served> list = module_functions<Weight, uint64_t, bool>();
  list.push_back(remote<weight_now>);
  add(list, context_functions());
  add(list, optimizer_functions<optim::Sgd>());
  add(list, optimizer_functions<optim::Adam>());
  add(list, optimizer_functions<optim::AdamW>());
  add(list, optimizer_functions<optim::Adagrad>());
  add(list, optimizer_functions<optim::Rmsprop>());
  add(list, optimizer_functions<optim::Adadelta>());
  add(list, optimizer_functions<optim::Adamax>());
  add(list, optimizer_functions<optim::Rprop>());
  add(list, optimizer_functions<Failing>());
  return list;
}

// Three steps on two workers give the weights of the same steps on one.
template <class O>
void expect_as_local(Agent& agent, const OptionsOf<O>& options, bool second_wanted) {
  const Tensor t1 = pattern({3, 3}, 11), t2 = pattern({3, 3}, 12);
  Weight first(0, true), second(0, second_wanted);
  NamedTensors all{{"0", first.w}};
  all.emplace_back("1", second.w);
  O local(all, options);

  RemoteModule<Weight> far1(agent, next(agent), uint64_t{0}, true),
      far2(agent, next(agent, 2), uint64_t{0}, second_wanted);
  std::vector<RRef<Tensor>> parameters = far1.remote_parameters();
  for (const auto& parameter : far2.remote_parameters()) parameters.push_back(parameter);
  DistributedOptimizer<O> optimizer(agent, parameters, options);
  for (int step = 0; step < 3; ++step) {
    local.zero_grad();
    backward(sum(add(second.forward(first.forward(t2)), t1)));
    local.step();
    Context context(agent);
    context.backward({sum(add(far2.forward(far1.forward(t2)), t1))});
    optimizer.step(context);
    EXPECT_EQ(agent.call<weight_now>(next(agent), far1.module_rref()).template to_vector<float>(),
              first.w.template to_vector<float>());
    EXPECT_EQ(agent.call<weight_now>(next(agent, 2), far2.module_rref()).template to_vector<float>(),
              second.w.template to_vector<float>());
  }
  EXPECT_NE(first.w.template to_vector<float>(), first_weight(0).template to_vector<float>());
  EXPECT_EQ(second.w.template to_vector<float>() == first_weight(0).template to_vector<float>(), !second_wanted);
}

// spec: test_dist_optim
TEST(DistributedOptimizer, StepsAsALocalOneDoes) {
  run_agents(4, for_tests(functions()), [](Agent& agent, comm::Group&) {
    expect_as_local<optim::Adagrad>(agent, {.lr = 0.05}, true);
    expect_as_local<optim::Adam>(agent, {.lr = 1e-2, .amsgrad = true}, true);
    expect_as_local<optim::AdamW>(agent, {.lr = 0.05, .amsgrad = true}, true);
    expect_as_local<optim::Sgd>(agent, {.lr = 0.05}, true);
    expect_as_local<optim::Sgd>(agent, {.lr = 1e-3, .momentum = 1, .weight_decay = 1, .nesterov = true}, true);
    expect_as_local<optim::Rmsprop>(agent, {.lr = 0.05}, true);
    expect_as_local<optim::Adadelta>(agent, {.rho = 0.95}, true);
    expect_as_local<optim::Adamax>(agent, {.lr = 0.05}, true);
    expect_as_local<optim::Rprop>(agent, {.lr = 0.05}, true);
  });
}

// spec: test_dist_optim_none_grads
TEST(DistributedOptimizer, LeavesParametersWithoutGradientsAlone) {
  run_agents(4, for_tests(functions()), [](Agent& agent, comm::Group&) {
    expect_as_local<optim::Sgd>(agent, {.lr = 0.05}, false);
    expect_as_local<optim::Rmsprop>(agent, {.lr = 0.05}, false);
    expect_as_local<optim::Adadelta>(agent, {.rho = 0.95}, false);
    expect_as_local<optim::Rprop>(agent, {.lr = 0.05}, false);
  });
}

// spec: test_dist_optim_exception
TEST(DistributedOptimizer, AnErrorInAStepReachesTheCaller) {
  run_agents(4, for_tests(functions()), [](Agent& agent, comm::Group& group) {
    RemoteModule<Weight> far1(agent, next(agent), uint64_t{1}, true), far2(agent, next(agent, 2), uint64_t{2}, true);
    auto parameters = far1.remote_parameters();
    parameters.push_back(far2.remote_parameters()[0]);
    DistributedOptimizer<Failing> optimizer(agent, parameters, {.lr = 0.5});
    Context context(agent);
    context.backward({sum(far2.forward(far1.forward(pattern({3, 3}, 3))))});
    std::atomic<int>& updates = Failing::updates[static_cast<size_t>(group.rank())];
    updates = 0;
    EXPECT_THAT(text_of(Kind::kRemote, [&] { optimizer.step(context); }), HasSubstr("simulated step error"));
    EXPECT_EQ(updates, 2);  // all owners have answered
  });
}

// spec: test_dist_optim_exception_on_constructor
TEST(DistributedOptimizer, AnErrorInAConstructorIsOneHere) {
  run_agents(4, for_tests(functions()), [](Agent& agent, comm::Group& group) {
    RemoteModule<Weight> far(agent, next(agent), uint64_t{1}, true);
    EXPECT_THAT(text_of(Kind::kRemote, (group.rank() + 1) % 4,
                        [&] { DistributedOptimizer<Failing>(agent, far.remote_parameters(), {.lr = 2}); }),
                HasSubstr("simulated constructor error"));
  });
}

// spec: x_dist_optim_bad_context
TEST(DistributedOptimizer, ABadContextIsAnErrorBeforeAnythingIsSent) {
  run_agents(4, for_tests(functions()), [](Agent& agent, comm::Group& group) {
    RemoteModule<Weight> far(agent, next(agent), uint64_t{1}, true);
    DistributedOptimizer<optim::Sgd> optimizer(agent, far.remote_parameters(), {.lr = 2});
    expect_soon("all is quiet", [&] { return agent.debug().own_calls == 0; });
    const int64_t before = agent.debug().requests;
    EXPECT_THAT(text_of(Kind::kUnknownContext, group.rank(), [&] { optimizer.step(100); }), HasSubstr("context 100"));
    EXPECT_EQ(agent.debug().requests, before);
  });
}

// ---- remote modules

struct Reverses : nn::Module {
  nn::Parameter p{ones({1})};
  CHORALE_MODULE(Reverses, p)
  std::tuple<std::string, int64_t, Tensor> forward(const Tensor& x, int64_t number, const std::string& word) {
    return {word, number, x};
  }
};
std::tuple<std::string, int64_t, Tensor> forward_from_there(RemoteModule<Reverses> module) {
  return module.forward(ones({1}), 2, std::string("3"));
}
RemoteDevice place_of(const RemoteModule<Reverses>& module) { return module.on(); }
struct Bad : nn::Module {
  CHORALE_MODULE(Bad)
  Bad() { throw StateError("this module cannot be made"); }
  Tensor forward(const Tensor& x) { return x; }
};

std::vector<Served> module_tests() {
  std::vector<Served> list = module_functions<Reverses>();
  add(list, module_functions<Bad>());
  list.push_back(remote<forward_from_there>);
  list.push_back(remote<place_of>);
  return list;
}

void expect_reversed(const std::tuple<std::string, int64_t, Tensor>& result) {
  EXPECT_EQ(std::get<0>(result), "3");
  EXPECT_EQ(std::get<1>(result), 2);
  EXPECT_EQ(std::get<2>(result).to_vector<float>(), std::vector<float>{1});
}

// spec: test_forward_sync, test_forward_async, test_forward_with_kwargs, test_remote_parameters, test_get_module_rref
// spec: test_train_eval, test_forward_{sync,async}_script
TEST(RemoteModules, AreCalledTrainedAndEvaluatedFromHere) {
  run_agents(4, for_tests(module_tests()), [](Agent& agent, comm::Group& group) {
    const int there = (group.rank() + 1) % 4;
    for (const std::string& where :
         {next(agent), next(agent) + "/cpu", concat("rank:", there), concat("rank:", there, "/cpu")}) {
      RemoteModule<Reverses> module(agent, where);
      expect_reversed(module.forward(ones({1}), 2, std::string("3")));
      expect_reversed(module.forward_async(ones({1}), 2, std::string("3")).wait());
      const auto parameters = module.remote_parameters();
      ASSERT_EQ(parameters.size(), 1u);
      EXPECT_EQ(parameters[0].to_here().to_vector<float>(), std::vector<float>{1});
      EXPECT_EQ(module.module_rref().owner().name, next(agent));
      EXPECT_TRUE(module.is_training());
      module.eval();
      EXPECT_FALSE(module.is_training());
      module.train();
      EXPECT_TRUE(module.is_training());
    }
  });
}

// spec: test_bad_module
TEST(RemoteModules, OneThatCannotBeMadeIsAnErrorAtItsFirstUse) {
  static_assert(!std::is_base_of_v<nn::Module, std::string>);  // RemoteModule<std::string> does not compile
  run_agents(4, for_tests(module_tests()), [](Agent& agent, comm::Group&) {
    RemoteModule<Bad> module(agent, next(agent));
    EXPECT_THAT(text_of(Kind::kRemote, [&] { module.forward(ones({1})); }), HasSubstr("this module cannot be made"));
  });
}

// spec: test_send_remote_module_over_the_wire, test_create_remote_module_from_module_rref
// spec: test_send_remote_module_with_a_new_attribute_not_pickled_over_the_wire
TEST(RemoteModules, CanBePassedOn) {
  run_agents(4, for_tests(module_tests()), [](Agent& agent, comm::Group& group) {
    const int there = (group.rank() + 1) % 4;
    for (const std::string& where : {next(agent), concat("rank:", there, "/cpu")}) {
      const RemoteModule<Reverses> module(agent, where);
      EXPECT_EQ(module.on().device, "cpu");
      expect_reversed(agent.call<forward_from_there>(next(agent, 2), module));
      EXPECT_EQ(agent.call<place_of>(next(agent, 2), module), module.on());
      RemoteModule<Reverses> same(agent, module.module_rref());
      expect_reversed(same.forward(ones({1}), 2, std::string("3")));
      EXPECT_EQ(same.on().worker, next(agent));
    }
  });
}

// spec: test_remote_module_py_pickle_not_supported
TEST(RemoteModules, CannotBeStored) {
  run_agents(4, for_tests(module_tests()), [](Agent& agent, comm::Group&) {
    const RemoteModule<Reverses> module(agent, next(agent));
    Writer writer;
    text_of(Kind::kUnsupported, [&] { write(writer, module); });
  });
}

// What a module can do besides is done on its worker. Asking a remote one for it does not compile.
template <class M>
concept DoesMore = requires(M m) {
  m.register_buffer();
}
|| requires(M m) { m.register_parameter(); }
|| requires(M m) { m.add_module(); }
|| requires(M m) { m.apply(); }
|| requires(M m) { m.cuda(); }
|| requires(M m) { m.ipu(); }
|| requires(M m) { m.xpu(); }
|| requires(M m) { m.cpu(); }
|| requires(M m) { m.type(); }
|| requires(M m) { m.float_(); }
|| requires(M m) { m.double_(); }
|| requires(M m) { m.half(); }
|| requires(M m) { m.bfloat16(); }
|| requires(M m) { m.to(kCpu); }
|| requires(M m) { m.register_backward_hook(); }
|| requires(M m) { m.register_forward_pre_hook(); }
|| requires(M m) { m.register_forward_hook(); }
|| requires(M m) { m.state_dict(); }
|| requires(M m) { m.load_state_dict(); }
|| requires(M m) { m.parameters(); }
|| requires(M m) { m.named_parameters(); }
|| requires(M m) { m.buffers(); }
|| requires(M m) { m.named_buffers(); }
|| requires(M m) { m.children(); }
|| requires(M m) { m.named_children(); }
|| requires(M m) { m.modules(); }
|| requires(M m) { m.named_modules(); }
|| requires(M m) { m.requires_grad_(); }
|| requires(M m) { m.zero_grad(); }
|| requires(M m) { m.share_memory(); }
|| requires(M m) { m.extra_repr(); };
// spec: test_unsupported_methods
TEST(RemoteModules, HaveNoOtherMethodsOfModules) {
  static_assert(DoesMore<Reverses>);
  static_assert(!DoesMore<RemoteModule<Reverses>>);
}

TEST(RemoteModules, PlacesAreParsed) {
  EXPECT_EQ(parse_remote_device("a/cpu").worker, "a");
  EXPECT_EQ(parse_remote_device("rank:3").rank, 3);
  const std::pair<const char*, const char*> bad[] = {{"", "names no worker"},      {"/cpu", "names no worker"},
                                                     {"a/cpu/x", "more than one"}, {"a/", "names no device"},
                                                     {"a/tpu", "no device 'tpu'"}, {"rank:x", "comes a number"},
                                                     {"rank:-1", "comes a number"}};
  for (const auto& [text, why] : bad) {
    try {
      parse_remote_device(text);
      ADD_FAILURE() << text;
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr(why));
    }
  }
}

}  // namespace
}  // namespace chorale::rpc
