// Checkpoints of fully sharded, replicated, tensor parallel and plain models, and of one kind loaded by another: rows
// of B4 and B7 of spec/sharded-training.md.
#include "chorale/comm/objects.h"
#include "chorale/data/loader.h"
#include "chorale/fsdp/fsdp_test_util.h"
#include "chorale/fsdp/state.h"
#include "chorale/parallel/tensor_parallel.h"
#include "chorale/snapshot/async_saver.h"
#include "chorale/snapshot/stateful.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::fsdp {
namespace {

enum class Kind : uint8_t { kPlain, kDdp, kFsdp, kHsdp, kTp, kFsdpTp, kHsdpTp };
constexpr std::array kNames{"plain", "DDP", "FSDP", "HSDP", "TP", "FSDP + TP", "HSDP + TP"};
std::ostream& operator<<(std::ostream& out, Kind kind) { return out << kNames.at(static_cast<size_t>(kind)); }

const parallel::Plan& parts_of_mlps() {
  static const parallel::Plan entries{{"layers.*.in_proj", parallel::Colwise()},
                                      {"layers.*.out_proj", parallel::Rowwise()}};
  return entries;
}

// A model of one of these kinds with its optimizer.
struct Trained {
  MlpStack model;
  std::unique_ptr<DistributedDataParallel<MlpStack>> ddp;  // has the model, where it is used
  std::unique_ptr<optim::AdamW> optimizer;

  Trained(MlpStack from, Kind kind, const comm::Group& group) : model(std::move(from)) {
    const bool splits = kind == Kind::kTp || kind == Kind::kFsdpTp || kind == Kind::kHsdpTp;
    const int n = group.size();
    const auto mesh = [&]() -> Mesh {
      if (kind == Kind::kHsdp) return Mesh(group, {2, n / 2}, {"replicate", "shard"});
      if (kind == Kind::kTp) return Mesh(group, {n}, {"tp"});
      if (kind == Kind::kFsdpTp) return Mesh(group, {n / 2, 2}, {"shard", "tp"});
      if (kind == Kind::kHsdpTp) return Mesh(group, {2, n / 4, 2}, {"replicate", "shard", "tp"});
      return line(group);
    }();
    if (splits) parallel::tensor_parallel(model, mesh["tp"], parts_of_mlps());
    if (kind == Kind::kFsdp || kind == Kind::kHsdp) shard_layers_and_root(model, model.layers, {.mesh = mesh});
    if (kind == Kind::kFsdpTp) shard_layers_and_root(model, model.layers, {.mesh = mesh["shard"]});
    if (kind == Kind::kHsdpTp) shard_layers_and_root(model, model.layers, {.mesh = mesh.slice({"replicate", "shard"})});
    if (kind == Kind::kDdp) ddp = std::make_unique<DistributedDataParallel<MlpStack>>(std::move(model), group);
    optimizer = std::make_unique<optim::AdamW>(own().named_parameters(), optim::AdamWOptions{.lr = 1e-2});
  }
  MlpStack& own() { return ddp ? ddp->module() : model; }

  double step(int number) {
    optimizer->zero_grad();
    const Tensor x = pattern({4, 6}, number);  // the same on all ranks: those that share a model must see the same
    const Tensor loss = mean(square(sub(ddp ? (*ddp)(x) : model(x), 0.5)));
    backward(loss);
    optimizer->step();
    return loss.item<float>();
  }
  snapshot::State state() {
    snapshot::State all = snapshot::state_of(own().state_dict(), "model/");
    for (const auto& [key, value] : optimizer->state_dict()) snapshot::add_chunks(all, "optimizer/" + key, value);
    return all;
  }
  void load(const comm::Group& group, const std::filesystem::path& folder) {
    // A step of zeros makes the optimizer's states; what it changes is then overwritten.
    for (const Tensor& p : own().parameters()) set_gradient(p, zeros_like(detach(p)));
    optimizer->step();
    optimizer->zero_grad();
    snapshot::State all = snapshot::state_of(own().state_dict(), "model/");
    const NamedTensors states = optimizer->state_dict();
    for (const auto& [key, value] : states) snapshot::add_chunks(all, "optimizer/" + key, value);
    snapshot::load(group, folder, all);
    optimizer->load_state_dict(states);
  }
};

void expect_to_go_on(Kind kind, bool in_background) {
  SCOPED_TRACE(testing::Message() << kind);
  const TemporaryFolder folder;
  run_ranks(kind == Kind::kPlain ? 1 : 4, [&](comm::Group& group) {
    Trained one(seeded(MlpStack(1, 6)), kind, group);
    snapshot::AsyncSaver saver(group);
    std::vector<double> expected;
    for (int step = 0; step < 5; ++step) {
      const double loss = one.step(step);
      if (step > 2) expected.push_back(loss);
      // The second save copies into the memory of the first, while training goes on.
      if (in_background && (step == 1 || step == 2)) saver.start(folder / "x", one.state());
      if (!in_background && step == 2) snapshot::save(group, folder / "x", one.state());
    }
    saver.wait();
    Trained two(seeded(MlpStack(1, 6), 40), kind, group);
    two.load(group, folder / "x");
    EXPECT_EQ((std::vector{two.step(3), two.step(4)}), expected);
    EXPECT_NE(expected.front(), expected.back());
  });
}

// spec: test_e2e
TEST(CheckpointsOfModels, TrainingGoesOnWithTheLossesThatItWouldHaveHad) {
  for (const Kind kind : {Kind::kPlain, Kind::kDdp, Kind::kFsdp, Kind::kHsdp, Kind::kFsdpTp})
    expect_to_go_on(kind, false);
}

// spec: test_e2e_async_cached
TEST(CheckpointsOfModels, TrainingGoesOnLikewiseFromSavesInTheBackground) {
  for (const Kind kind : {Kind::kPlain, Kind::kDdp, Kind::kFsdp, Kind::kHsdp, Kind::kFsdpTp})
    expect_to_go_on(kind, true);
}

// A training whose steps depend on everything that it has: optimizer, schedule, random numbers, place in the data.
struct WithObjects {
  Trained training;
  optim::Scheduler schedule;
  Generator noise;
  data::DataLoader<data::TensorDataset> loader;

  WithObjects(const comm::Group& group, double seed)
      : training(seeded(MlpStack(1, 6), seed), Kind::kFsdp, group),
        schedule(*training.optimizer, optim::cosine({.steps = 8})),
        noise(static_cast<uint64_t>(seed)),
        loader(data::TensorDataset(pattern({10, 6}, 3)), {.batch_size = 4, .shuffle = true, .drop_last = true}) {}
  double step() {
    auto batch = loader.next();
    if (!batch) batch = loader.next();  // of the next epoch
    training.optimizer->zero_grad();
    const Tensor loss = mean(square(training.model(add(batch->x, normal({4, 6}, 0, 1, DType::kF32, noise)))));
    backward(loss);
    training.optimizer->step();
    schedule.step();
    return loss.item<float>();
  }
  snapshot::Objects objects() {
    return {{"optimizer", snapshot::stateful(*training.optimizer)},
            {"schedule", snapshot::stateful(schedule)},
            {"noise", snapshot::stateful(noise)},
            {"loader", snapshot::stateful(loader)}};
  }
};

TEST(CheckpointsOfModels, ObjectsGoOnWhereTheyWereAmongFewerRanks) {
  const TemporaryFolder folder;
  std::vector<double> expected;
  run_ranks(4, [&](comm::Group& group) {
    WithObjects one(group, 1);
    for (int step = 0; step < 3; ++step) one.step();  // two to an epoch
    snapshot::save_objects(group, folder / "x", one.objects(), snapshot::state_of(one.training.model.state_dict()));
    std::vector<double> losses;
    for (int step = 3; step < 8; ++step) losses.push_back(one.step());
    if (group.rank() == 0) expected = losses;
  });
  EXPECT_NE(expected.front(), expected.back());
  run_ranks(2, [&](comm::Group& group) {
    WithObjects two(group, 40);
    two.step();  // the optimizer has its states, and everything else is where it should not be
    snapshot::State model = snapshot::state_of(two.training.model.state_dict());
    snapshot::load_objects(group, folder / "x", two.objects(), model);
    std::vector<double> losses;
    for (int step = 3; step < 8; ++step) losses.push_back(two.step());
    EXPECT_EQ(losses, expected);
    snapshot::State state = snapshot::stateful(two.noise).state();
    state.bytes["offset"] = "12 ";
    EXPECT_THROW(snapshot::stateful(two.noise).load(state), InvalidArgument);
  });
}

Tensor whole_of_any(const Tensor& x) {
  const NoGrad quiet;
  return x.is_sharded() ? full_tensor(detach(x)) : detach(x);
}

// spec: test_tp_checkpoint, test_tp_checkpoint_load_on_meta_device, test_fsdp_to_tp, test_hsdp_checkpoint
// spec: test_hsdp_fsdp_checkpoint_conversion
TEST(CheckpointsOfModels, OneKindLoadsWhatAnotherSaved) {
  for (const auto& [dim, multiplier] : {std::pair<int64_t, int64_t>{6, 4}, {5, 3}}) {
    const TemporaryFolder folder;
    run_ranks(4, [&, d = dim, m = multiplier](comm::Group& group) {
      const MlpStack values = seeded(MlpStack(2, d, m));
      const std::vector kinds{Kind::kDdp, Kind::kFsdp, Kind::kHsdp, Kind::kTp, Kind::kFsdpTp};
      for (const Kind saved : kinds) {
        Trained from(clone(values), saved, group);
        const auto path = folder / concat(d, "-", static_cast<int>(saved));
        snapshot::save(group, path, snapshot::state_of(from.own().state_dict(), "model/"));
        for (const Kind loaded : kinds) {
          for (const bool without_memory : {false, true}) {
            if (without_memory && loaded != Kind::kTp && loaded != Kind::kFsdp) continue;
            MlpStack start = seeded(MlpStack(2, d, m), 60);
            if (without_memory) start.to(kNull);
            Trained to(std::move(start), loaded, group);
            if (without_memory) to.own().materialize(kCpu);
            snapshot::State state = snapshot::state_of(to.own().state_dict(), "model/");
            snapshot::load(group, path, state);
            const NamedTensors found = to.own().named_parameters(), expected = values.named_parameters();
            for (size_t i = 0; i < expected.size(); ++i) {
              expect_close(whole_of_any(found[i].second), expected[i].second, 0,
                           concat(saved, " to ", loaded, without_memory ? " without memory " : " ", expected[i].first,
                                  " of ", d, " x ", m));
            }
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    });
  }
}

// A model with tied weights, a number that is saved and one that is not, in groups with and without decay.
struct Stateful : nn::Module {
  nn::Linear first{6, 6}, second{6, 6};
  nn::Buffer counted{pattern({2}, 3)}, scratch{nn::Buffer(pattern({2}, 4), false)};
  CHORALE_MODULE(Stateful, first, second, counted, scratch)
  Stateful() { second.weight = first.weight; }
  Tensor forward(const Tensor& x) { return second(relu(first(x))); }
};
std::vector<optim::ParameterGroup<optim::AdamWOptions>> decay_groups(const NamedTensors& all, bool reversed = false) {
  std::vector<optim::ParameterGroup<optim::AdamWOptions>> groups{{{}, {.lr = 0.05, .weight_decay = 0.1}},
                                                                 {{}, {.lr = 0.02, .weight_decay = 0}}};
  for (const auto& [name, p] : all) groups[p.dims() == 2 ? 0 : 1].parameters.emplace_back(name, p);
  if (reversed) {
    for (auto& group : groups) std::reverse(group.parameters.begin(), group.parameters.end());
  }
  return groups;
}
std::vector<std::string> keys_of(const NamedTensors& state) {
  std::vector<std::string> keys;
  for (const auto& [key, x] : state) keys.push_back(key);
  std::sort(keys.begin(), keys.end());
  return keys;
}
NamedTensors wholes_of(const NamedTensors& state) {
  NamedTensors wholes;
  for (const auto& [key, x] : state) wholes.emplace_back(key, clone(whole_of_any(x)));
  return wholes;
}
void expect_equal_states(NamedTensors a, NamedTensors b, const std::string& what) {
  std::sort(a.begin(), a.end(), [](const auto& x, const auto& y) { return x.first < y.first; });
  std::sort(b.begin(), b.end(), [](const auto& x, const auto& y) { return x.first < y.first; });
  ASSERT_EQ(keys_of(a), keys_of(b)) << what;
  for (size_t i = 0; i < a.size(); ++i) expect_close(a[i].second, b[i].second, 0, concat(what, " ", a[i].first));
}

// spec: test_fsdp2, test_ddp, test_fsdp_ddp, test_shared_weight, test_multi_param_groups, test_flattened_osd
// spec: test_broadcast_from_rank0, TestStateDict.test_strict, test_extra_state, test_non_persistent_buffers
// spec: test_optim_state_dict_param_matching
TEST(CheckpointsOfModels, StatesHaveTheNamesOfTheWholeModel) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const auto step = [](auto& model, optim::AdamW& optimizer, int number) {
      optimizer.zero_grad();
      backward(mean(square(model(pattern({4, 6}, number)))));  // the same on both ranks: the average is exact
      optimizer.step();
    };
    Stateful plain = seeded(Stateful()), sharded = clone(plain);
    DistributedDataParallel<Stateful> ddp(clone(plain), group);
    fully_shard(sharded, {.mesh = mesh});
    optim::AdamW one(decay_groups(plain.named_parameters())), two(decay_groups(ddp.named_parameters())),
        three(decay_groups(sharded.named_parameters()));
    for (int i = 0; i < 3; ++i) {
      step(plain, one, i);
      step(ddp, two, i);
      step(sharded, three, i);
    }
    // Keys and values are those of the model that nobody shares.
    const NamedTensors model = wholes_of(plain.state_dict()), optimizer = wholes_of(one.state_dict());
    EXPECT_EQ(keys_of(model),
              (std::vector<std::string>{"counted", "first.bias", "first.weight", "second.bias", "second.weight"}));
    EXPECT_EQ(std::count_if(optimizer.begin(), optimizer.end(), [](const auto& x) { return x.first == "groups/1/lr"; }),
              1);
    expect_equal_states(wholes_of(ddp.state_dict()), model, "DDP");
    expect_equal_states(wholes_of(sharded.state_dict()), model, "FSDP");
    expect_equal_states(wholes_of(two.state_dict()), optimizer, "DDP's optimizer");
    expect_equal_states(wholes_of(three.state_dict()), optimizer, "FSDP's optimizer");
    step(plain, one, 7);
    // Set from what another kind gave, with parameters in another order; and from the first rank's alone, beside a
    // state of no tensor.
    for (const bool from_first : {false, true}) {
      Stateful other = seeded(Stateful(), 90);
      fully_shard(other, {.mesh = mesh});
      optim::AdamW four(decay_groups(other.named_parameters(), true));
      NamedTensors states = optimizer;
      if (from_first) {
        NamedTensors mine = model;
        std::vector<comm::Value> sent(1);
        if (group.rank() != 0) {
          for (auto& [key, x] : mine) x = zeros_like(x);
          states.clear();
        } else {
          comm::Map map;
          for (const auto& [key, x] : states) map[key] = x;
          sent[0] = comm::List{map, comm::Value("epoch 3")};
        }
        load_full_state_dict(other, mine, 0);
        comm::broadcast_object_list(group, sent, 0);
        const auto& list = sent[0].as<comm::List>();
        EXPECT_EQ(list[1].as<std::string>(), "epoch 3");
        states.clear();
        for (const auto& [key, x] : list[0].as<comm::Map>()) states.emplace_back(key, x.as<Tensor>());
      } else {
        other.load_state_dict(model);
      }
      four.load_state_dict(states);
      step(other, four, 7);
      expect_equal_states(wholes_of(other.state_dict()), wholes_of(plain.state_dict()), "after the next step");
    }
    // Strict, or not.
    NamedTensors less = model;
    std::erase_if(less, [](const auto& x) { return x.first == "first.bias"; });
    EXPECT_THROW(sharded.load_state_dict(less), InvalidArgument);
    EXPECT_EQ(sharded.load_state_dict(less, false).missing, std::vector<std::string>{"first.bias"});
  });
}

// spec: test_2d_state_dict_correctness, test_{dp,hsdp}_tp_state_dict_save_load
TEST(CheckpointsOfModels, StatesOfShardsOverPartsAreWholeAndLoad) {
  for (const Kind kind : {Kind::kFsdpTp, Kind::kHsdpTp}) {
    run_ranks(kind == Kind::kFsdpTp ? 4 : 8, [&](comm::Group& group) {
      for (const int64_t dim : {5, 6}) {
        const MlpStack values = seeded(MlpStack(2, dim));
        Trained one(clone(values), kind, group), two(seeded(MlpStack(2, dim), 60), kind, group);
        const NamedTensors state = one.own().state_dict(), expected = values.state_dict();
        ASSERT_EQ(state.size(), expected.size());
        for (size_t i = 0; i < state.size(); ++i) {
          EXPECT_EQ(state[i].first, expected[i].first);
          EXPECT_TRUE(state[i].second.is_sharded());
          expect_close(whole_of_any(state[i].second), expected[i].second, 0, concat(kind, " ", state[i].first));
        }
        two.own().load_state_dict(state);
        const Tensor x = pattern({3, dim}, 2);
        expect_close(detach(two.model(x)), detach(one.model(x)), 0, "with a state of shards");
        const NamedTensors all = full_state_dict(one.own());
        for (size_t i = 0; i < all.size(); ++i) expect_close(all[i].second, expected[i].second, 0, all[i].first);
      }
    });
  }
}

}  // namespace
}  // namespace chorale::fsdp
