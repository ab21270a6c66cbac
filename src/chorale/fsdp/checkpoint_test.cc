// Checkpoints of fully sharded, replicated, tensor parallel and plain models, and of one kind loaded by another: rows
// of B4 and B7 of spec/sharded-training.md.
#include "chorale/fsdp/fsdp_test_util.h"
#include "chorale/fsdp/state.h"
#include "chorale/parallel/tensor_parallel.h"
#include "chorale/snapshot/async_saver.h"
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
