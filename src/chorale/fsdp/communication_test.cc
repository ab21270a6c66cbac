// What fully sharded training sends, and when: section B3 of spec/sharded-training.md.
#include <gmock/gmock.h>

#include <sstream>

#include "chorale/fsdp/fsdp_test_util.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/trace/trace.h"

namespace chorale::fsdp {
namespace {

using testing::HasSubstr;

std::vector<trace::Event> traced(const std::vector<trace::Event>& events, const std::string& name, int rank) {
  std::vector<trace::Event> found;
  for (const trace::Event& event : events) {
    if (event.name == name && event.rank == rank) found.push_back(event);
  }
  return found;
}

// What is gathered ahead is on its way while the module before computes, and so is a reduction while the next module's
// gradients are computed.
TEST(FullyShardedCommunication, TheTraceShowsWhatIsSentWhileModulesCompute) {
  for (const bool helper : {false, true}) {
    run_ranks(2, [helper](comm::Group& group) {
      Transformer model = seeded(Transformer(3));
      shard_layers_and_root(model, model.layers, {.mesh = line(group), .helper_thread = helper});
      set_modules_to_forward_prefetch(model.layers[0], {&model.layers[1]});
      for (int step = 0; step < 2; ++step) {
        if (step == 1) {
          group.barrier().wait();
          if (group.rank() == 0) trace::start();
          group.barrier().wait();
        }
        backward(sum(model(ids({2, 6}, group.rank(), 8))));
        model.zero_grad();
      }
    });
    const auto events = trace::stop();
    for (const int rank : {0, 1}) {
      const auto one = [&](const std::string& name, size_t which = 0, size_t of = 1) {
        const auto found = traced(events, name, rank);
        EXPECT_EQ(found.size(), of) << name << " on rank " << rank;
        return found.size() == of ? found[which] : trace::Event{};
      };
      const auto begins_within = [&](const trace::Event& call, const trace::Event& computing) {
        EXPECT_TRUE(call.async && call.kind == trace::Kind::kBucket) << call.name;
        EXPECT_GE(call.start, computing.start) << call.name << " in " << computing.name;
        EXPECT_LE(call.start, computing.end) << call.name << " in " << computing.name;
        EXPECT_LE(call.start, call.end) << call.name;
      };
      begins_within(one("gather layers.1", 0, 2), one("forward layers.0"));
      begins_within(one("gather layers.1", 1, 2), one("backward layers.2"));
      begins_within(one("gather layers.0", 1, 2), one("backward layers.1"));
      // The reduction of the last layer is waited for when the one before is done.
      const trace::Event reduced = one("reduce layers.2"), next = one("backward layers.1");
      EXPECT_LE(reduced.start, next.end);
      EXPECT_GE(one("reduce layers.1").start, reduced.end);
      // Without a prefetch a gather is before its module computes.
      EXPECT_LE(one("gather layers.2", 0, 2).end, one("forward layers.2").start);
    }
  }
}

struct Counts {
  int64_t forward, backward, reduced, total;
};
Counts step_counts(Transformer& model, const Tensor& x, const std::function<void()>& between = {}) {
  CommCounter counter;
  const Tensor loss = sum(model(x));
  if (between) between();
  const int64_t forward = counter.all_gathers();
  backward(loss);
  model.zero_grad();
  return {forward, counter.all_gathers() - forward, counter.reduce_scatters(), counter.total()};
}
void expect_counts(const Counts& found, int64_t forward, int64_t backward, int64_t reduced) {
  EXPECT_EQ(found.forward, forward);
  EXPECT_EQ(found.backward, backward);
  EXPECT_EQ(found.reduced, reduced);
  EXPECT_EQ(found.total, forward + backward + reduced) << "nothing else";
}

// spec: test_fully_shard_communication_count
TEST(FullyShardedCommunication, OneGatherPerUseAndOneReductionPerGroup) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const Tensor x = ids({2, 6}, group.rank(), 8);
    const std::pair<ReshardAfterForward, int> cases[] = {{true, 3}, {false, 0}, {2, 3}, {{}, 2}};
    for (const auto& [policy, gathers] : cases) {
      Transformer model = seeded(Transformer(2));
      shard_layers_and_root(model, model.layers, {.mesh = mesh, .reshard_after_forward = policy});
      for (int step = 0; step < 2; ++step) expect_counts(step_counts(model, x), 3, gathers, 3);
    }
  });
}

// spec: test_manual_reshard_with_reshard_after_forward_false
TEST(FullyShardedCommunication, WhatIsLetGoByHandIsGatheredAgain) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    Transformer model = seeded(Transformer(2));
    shard_layers_and_root(model, model.layers, {.mesh = mesh, .reshard_after_forward = false});
    CommCounter counter;
    const Tensor loss = sum(model(ids({2, 6}, group.rank(), 8)));
    for (Block& layer : model.layers) reshard(layer);
    reshard(model);
    const int64_t before = counter.all_gathers();
    backward(loss);
    EXPECT_EQ(counter.all_gathers() - before, 3);
    EXPECT_EQ(counter.reduce_scatters(), 3);
  });
}

// spec: test_set_reshard_after_forward
TEST(FullyShardedCommunication, ThePolicyMayChange) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const Tensor x = ids({2, 6}, group.rank(), 8);
    const auto gathers = [&](std::optional<bool> policy, bool recurse) {
      Transformer model = seeded(Transformer(2));
      shard_layers_and_root(
          model, model.layers,
          {.mesh = mesh, .reshard_after_forward = policy ? ReshardAfterForward(!*policy) : ReshardAfterForward()});
      if (policy) set_reshard_after_forward(model, *policy, recurse);
      return step_counts(model, x).backward;
    };
    EXPECT_EQ(gathers(true, true), 3);
    EXPECT_EQ(gathers(true, false), 1);
    EXPECT_EQ(gathers(false, true), 0);
    EXPECT_EQ(gathers(false, false), 2);
    EXPECT_EQ(gathers(std::nullopt, true), 2);
  });
}

// What happened since the last call.
struct Log {
  explicit Log(nn::Module& root) {
    on_event(root, [this](const Event& event) {
      if (event.kind != Event::Kind::kReshard) events.push_back(event);
    });
  }
  std::string take() {
    std::ostringstream text;
    for (const Event& event : std::exchange(events, {})) text << event << " ";
    return text.str();
  }
  std::vector<Event> events;
};

struct WithHead : nn::Module {
  std::vector<Mlp> layers;
  nn::Linear head{8, 8};
  bool twice = false;
  size_t unused = 99;
  CHORALE_MODULE(WithHead, layers, head)
  WithHead() {
    for (int i = 0; i < 3; ++i) layers.emplace_back(8);
  }
  Tensor run(Tensor y) {
    for (size_t i = 0; i < 3; ++i) {
      if (i != unused) y = layers[i](y);
    }
    return y;
  }
  Tensor forward(const Tensor& in) { return head(run(in)); }
};

// spec: test_fully_shard_backward_prefetch
TEST(FullyShardedCommunication, BackwardGathersOneGroupAhead) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const Tensor x = pattern({2, 8}, group.rank());
    for (const auto& [policy, backward_events] :
         {std::pair(ReshardAfterForward(true),
                    "U() U(layers.2) U(layers.1) PB(layers.2) U(layers.0) PB(layers.1) PB(layers.0) PB() "),
          std::pair(ReshardAfterForward(),
                    "U(layers.2) U(layers.1) PB(layers.2) U(layers.0) PB(layers.1) PB(layers.0) PB() "),
          std::pair(ReshardAfterForward(false), "PB(layers.2) PB(layers.1) PB(layers.0) PB() ")}) {
      WithHead model = seeded(WithHead());
      shard_layers_and_root(model, model.layers, {.mesh = mesh, .reshard_after_forward = policy});
      backward(sum(model(x)));  // the first forward says what belongs together
      Log log(model);
      const Tensor loss = sum(model(x));
      EXPECT_EQ(log.take(), "U() U(layers.0) U(layers.1) U(layers.2) ");
      backward(loss);
      EXPECT_EQ(log.take(), backward_events);
      on_event(model, {});
    }
    // Two forwards before one backward.
    {
      WithHead model = seeded(WithHead());
      shard_layers_and_root(model, model.layers, {.mesh = mesh, .reshard_after_forward = true});
      backward(sum(model(x)));
      Log log(model);
      const Tensor loss = add(sum(model(x)), sum(model(x)));
      EXPECT_EQ(log.take(), "U() U(layers.0) U(layers.1) U(layers.2) U() U(layers.0) U(layers.1) U(layers.2) ");
      backward(loss);
      const std::string events = log.take();
      EXPECT_TRUE(events.ends_with("PB() ")) << events;
      on_event(model, {});
    }
    // One layer is not used: what is gathered ahead follows this step's order.
    {
      WithHead model = seeded(WithHead());
      shard_layers_and_root(model, model.layers, {.mesh = mesh, .reshard_after_forward = true});
      backward(sum(model(x)));
      model.unused = 1;
      Log log(model);
      const Tensor loss = sum(model(x));
      EXPECT_EQ(log.take(), "U() U(layers.0) U(layers.2) ");
      backward(loss);
      EXPECT_EQ(log.take(), "U() U(layers.2) U(layers.0) PB(layers.2) PB(layers.0) PB() ");
      on_event(model, {});
    }
  });
}

// spec: test_set_modules_to_{forward,backward}_prefetch, test_backward_misprefetch
TEST(FullyShardedCommunication, WhatIsGatheredAheadMayBeChosen) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const Tensor x = pattern({2, 8}, group.rank());
    WithHead model = seeded(WithHead()), plain = clone(model);
    shard_layers_and_root(model, model.layers, {.mesh = mesh, .reshard_after_forward = true});
    backward(sum(model(x)));
    model.zero_grad();
    {
      set_modules_to_forward_prefetch(model, {&model.layers[0], &model.layers[1]});
      set_modules_to_forward_prefetch(model.layers[0], {&model.layers[1], &model.layers[2]});
      set_modules_to_backward_prefetch(model, {&model.layers[2], &model.layers[1]});
      set_modules_to_backward_prefetch(model.layers[2], {&model.layers[1], &model.layers[0]});
      set_modules_to_backward_prefetch(model.layers[1], {&model.layers[0]});
      Log log(model);
      const Tensor loss = sum(model(x));
      EXPECT_EQ(log.take(), "U() U(layers.0) U(layers.1) U(layers.2) ");
      backward(loss);
      EXPECT_EQ(log.take(), "U() U(layers.2) U(layers.1) U(layers.0) PB(layers.2) PB(layers.1) PB(layers.0) PB() ");
      on_event(model, {});
    }
    // A wrong guess: the root asks for the first layer, which comes last.
    model.zero_grad();
    set_modules_to_backward_prefetch(model, {&model.layers[0]});
    set_modules_to_backward_prefetch(model.layers[2], {&model.layers[2]});
    set_modules_to_backward_prefetch(model.layers[1], {&model.layers[1]});
    backward(sum(model(x)));
    const Tensor loss = sum(plain(x));
    backward(loss);
    for (const Tensor& p : plain.parameters()) {
      group.all_reduce(gradient(p), comm::premultiplied_sum(0.5)).wait();
    }
    expect_sharded_parity(model.named_parameters(), plain.named_parameters(), 0, "after a wrong guess");
    // Gathered ahead, and not used in this backward at all.
    model.unused = 1;
    set_modules_to_backward_prefetch(model, {&model.layers[1]});
    model.zero_grad();
    backward(sum(model(x)));
    EXPECT_TRUE(model.layers[1].in_proj.weight.is_sharded());
    EXPECT_FALSE(gradient(model.layers[1].in_proj.weight).defined());
  });
}

struct Empty : nn::Module {
  CHORALE_MODULE(Empty)
  Tensor forward(const Tensor& x) { return relu(x); }
};

// spec: test_unshard_async, test_unshard_no_param_group, test_unshard_without_lazy_init
TEST(FullyShardedCommunication, ParametersMayBeGatheredByHand) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const MlpStack whole = seeded(MlpStack(3, 6));
    DistributedDataParallel<MlpStack> reference(clone(whole), group);
    MlpStack model = clone(whole);
    shard_layers_and_root(model, model.layers, {.mesh = mesh});
    optim::Sgd one(reference.named_parameters(), {.lr = 0.1}), two(model.named_parameters(), {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      one.zero_grad();
      two.zero_grad();
      const Tensor x = pattern({2, 6}, group.rank() + 10 * step);
      std::vector<Unsharding> coming;
      for (Mlp& layer : model.layers) coming.push_back(unshard(layer, true));
      coming[1].wait();
      EXPECT_FALSE(model.layers[1].in_proj.weight.is_sharded());
      backward(sum(reference(x)));
      backward(sum(model(x)));
      one.step();
      two.step();
      expect_sharded_parity(model.named_parameters(), reference.named_parameters(), 0, concat("step ", step));
    }
    Empty empty;
    fully_shard(empty, {.mesh = mesh});
    const CommCounter counter;
    unshard(empty).wait();
    reshard(empty);
    EXPECT_EQ(counter.total(), 0);
    MlpStack fresh = clone(whole);
    fully_shard(fresh, {.mesh = mesh});
    unshard(fresh);  // before any forward
    const NoGrad quiet;
    for (size_t i = 0; i < 12; ++i) expect_close(fresh.parameters()[i], whole.parameters()[i], 0, "by hand");
    reshard(fresh);
    EXPECT_TRUE(fresh.parameters()[0].is_sharded());
  });
}

// spec: test_share_comm_context
TEST(FullyShardedCommunication, OutermostModulesMayShareWhatIsInFlight) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const MlpStack whole = seeded(MlpStack(4, 6));
    DistributedDataParallel<MlpStack> reference(clone(whole), group);
    // The same in two stages.
    MlpStack all = clone(whole), first(0, 6), second(0, 6);
    for (size_t i = 0; i < 4; ++i) (i < 2 ? first : second).layers.push_back(std::move(all.layers[i]));
    for (MlpStack* stage : {&first, &second}) shard_layers_and_root(*stage, stage->layers, {.mesh = mesh});
    share_comm_context({&first, &second});
    NamedTensors parameters = first.named_parameters();
    for (const auto& [name, p] : second.named_parameters())
      parameters.emplace_back(concat("layers.", std::stoi(name.substr(7)) + 2, name.substr(8)), p);
    optim::Sgd one(reference.named_parameters(), {.lr = 0.1}), two(parameters, {.lr = 0.1});
    std::vector<std::string> events;
    for (int step = 0; step < 3; ++step) {
      one.zero_grad();
      two.zero_grad();
      const Tensor x = pattern({2, 6}, group.rank() + 10 * step);
      backward(sum(reference(x)));
      const Tensor loss = sum(second(first(x)));
      on_event(second, [&](const Event& event) {
        std::ostringstream text;
        text << event;
        events.push_back(text.str());
      });
      events.clear();
      backward(loss);
      on_event(second, {});
      one.step();
      two.step();
      expect_sharded_parity(parameters, reference.named_parameters(), 0, concat("step ", step));
    }
    // The second stage gathers the first one's last layer ahead, before it reduces its own.
    const auto place = [&](const std::string& event, int which) {
      auto at = std::find(events.begin(), events.end(), event);
      for (; which > 0; --which) at = std::find(at + 1, events.end(), event);
      return at - events.begin();
    };
    EXPECT_LT(place("U(layers.1)", 1), place("PB(layers.0)", 0));
    EXPECT_THAT(message_of<StateError>([&] { share_comm_context({&first, &second}); }), HasSubstr("has run already"));
  });
}

// spec: test_all_gather_extensions_{train_parity,end_to_end,monkey_patch}
TEST(FullyShardedCommunication, SomethingElseMayBeSentThanTheParameter) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    // Rounded to bf16, beside a whole number for each row that says where the row was.
    const auto rounded = [](const Tensor& parameter) -> std::optional<Payload> {
      if (parameter.dims() != 2) return {};
      return Payload{.of_part =
                         [](const Tensor& part) {
                           return std::vector{to(part, DType::kBF16), full({part.size(0)}, 3, DType::kI64)};
                         },
                     .to_whole =
                         [](const std::vector<Tensor>& wholes) {
                           EXPECT_EQ(wholes[1].to_vector<int64_t>(),
                                     std::vector<int64_t>(static_cast<size_t>(wholes[0].size(0)), 3));
                           return to(wholes[0], DType::kF32);
                         }};
    };
    const MlpStack whole = seeded(MlpStack(3, 5));  // parts are uneven
    DistributedDataParallel<MlpStack> reference(clone(whole), group);
    MlpStack model = clone(whole);
    shard_layers_and_root(model, model.layers, {.mesh = mesh});
    for (Mlp& layer : model.layers) set_payload(layer, rounded);
    optim::Sgd one(reference.named_parameters(), {.lr = 0.1}), two(model.named_parameters(), {.lr = 0.1});
    for (int step = 0; step < 4; ++step) {
      one.zero_grad();
      two.zero_grad();
      const Tensor x = pattern({2, 5}, group.rank() + 10 * step);
      // The reference computes with rounded weights and updates those that are not.
      std::vector<Tensor> exact;
      {
        const NoGrad quiet;
        for (const auto& [name, p] : reference.named_parameters()) {
          exact.push_back(clone(p));
          if (p.dims() == 2) copy_(p, to(p, DType::kBF16));
        }
      }
      const Tensor loss = sum(reference(x)), other = sum(model(x));
      expect_close(other, loss, 0, concat("loss of step ", step));
      backward(loss);
      backward(other);
      {
        const NoGrad quiet;
        for (size_t i = 0; i < exact.size(); ++i) copy_(reference.named_parameters()[i].second, exact[i]);
      }
      one.step();
      two.step();
      expect_sharded_parity(model.named_parameters(), reference.named_parameters(), 0, concat("step ", step));
    }
    const NoGrad quiet;
    // What is sent must be as long as the part.
    set_payload(model.layers[1], [](const Tensor&) -> std::optional<Payload> {
      return Payload{[](const Tensor& part) { return std::vector{zeros({part.size(0) + 1})}; }, {}};
    });
    EXPECT_THAT(message_of<InvalidArgument>([&] { model(pattern({2, 5}, 1)); }), HasSubstr("as the part has"));
    set_payload(model.layers[1], nullptr);
    model(pattern({2, 5}, 1));
  });
}

// spec: test_set_reduce_scatter_divide_factor
TEST(FullyShardedCommunication, AFactorBelongsToOneGroup) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh meshes[] = {line(group), Mesh(group, {2, 2}, {"r", "s"}), Mesh(group, {4, 1}, {"r", "s"})};
    for (const Mesh& mesh : meshes) {
      for (const double factor : {4.0, 8.0}) {
        WithHead plain = seeded(WithHead()), model = clone(plain);
        shard_layers_and_root(model, model.layers, {.mesh = mesh});
        set_gradient_divide_factor(model, factor);
        const Tensor x = pattern({2, 8}, 1);  // the same everywhere
        backward(sum(plain(x)));
        backward(sum(model(x)));
        for (const Tensor& p : plain.head.parameters()) set_gradient(p, mul(gradient(p), 4 / factor));
        expect_sharded_parity(model.named_parameters(), plain.named_parameters(), 1e-6, concat("factor ", factor));
      }
    }
  });
}

// spec: test_fully_shard_force_sum_{reduce_scatter,both_reductions}, test_size1_reduceop
TEST(FullyShardedCommunication, SumsGiveTheSameAsAverages) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh meshes[] = {line(group), Mesh(group, {2, 2}, {"r", "s"}), Mesh(group, {4, 1}, {"r", "s"})};
    for (const Mesh& mesh : meshes) {
      MlpStack plain = seeded(MlpStack(2, 6)), model = clone(plain);
      shard_layers_and_root(model, model.layers, {.mesh = mesh});
      set_force_sum(model, true);
      const Tensor x = pattern({2, 6}, group.rank());
      backward(sum(plain(x)));
      backward(sum(model(x)));
      for (const Tensor& p : plain.parameters()) group.all_reduce(gradient(p), comm::premultiplied_sum(0.25)).wait();
      expect_sharded_parity(model.named_parameters(), plain.named_parameters(), 1e-5, "sums");
    }
  });
  run_ranks(1, [](comm::Group& group) {
    const Mesh meshes[] = {line(group), Mesh(group, {1, 1}, {"r", "s"})};
    for (const Mesh& mesh : meshes) {
      MlpStack plain = seeded(MlpStack(2, 6)), model = clone(plain);
      shard_layers_and_root(model, model.layers, {.mesh = mesh});
      const Tensor x = pattern({2, 6}, 1);
      backward(sum(plain(x)));
      const CommCounter counter;
      backward(sum(model(x)));
      EXPECT_EQ(counter.total(), 0);
      expect_sharded_parity(model.named_parameters(), plain.named_parameters(), 0, "one rank");
    }
  });
}

}  // namespace
}  // namespace chorale::fsdp
