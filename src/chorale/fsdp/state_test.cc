// States of fully sharded modules: section B4 of spec/sharded-training.md, modules without memory, checkpoints.
#include <gmock/gmock.h>

#include "chorale/base/generator.h"
#include "chorale/device/allocator.h"
#include "chorale/eager/sim_kernels.h"
#include "chorale/fsdp/fsdp_test_util.h"
#include "chorale/fsdp/state.h"
#include "chorale/models/bert.h"
#include "chorale/models/gpt2.h"
#include "chorale/op/device_scope.h"
#include "chorale/snapshot/snapshot.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::fsdp {
namespace {

using testing::HasSubstr;

// spec: test_dp_state_dict_save_load
TEST(FullyShardedState, IsShardedWheneverItIsTaken) {
  run_ranks(8, [](comm::Group& group) {
    const Mesh one = line(group), two(group, {4, 2}, {"replicate", "shard"});
    for (const Mesh& mesh : {one, two}) {
      for (const int64_t dim : {2, 3, 4, 5, 16}) {
        const MlpStack whole = seeded(MlpStack(2, dim));
        const NamedTensors values = whole.state_dict();
        for (const bool after : {false, true}) {
          MlpStack model = clone(whole), other = seeded(MlpStack(2, dim), 50);
          shard_layers_and_root(model, model.layers, {.mesh = mesh, .reshard_after_forward = false});
          shard_layers_and_root(other, other.layers, {.mesh = mesh, .reshard_after_forward = false});
          const Tensor x = pattern({2, dim}, 3);
          const Tensor expected = clone(whole)(x);
          if (after) {
            model(x);
            other(x);
          }
          const NamedTensors state = model.state_dict();
          ASSERT_EQ(state.size(), values.size());
          for (size_t i = 0; i < state.size(); ++i) {
            EXPECT_EQ(state[i].first, values[i].first);
            ASSERT_TRUE(state[i].second.is_sharded());
            EXPECT_EQ(placements_of(state[i].second).back(), shard(0));
            expect_close(full_tensor(state[i].second), values[i].second, 0, state[i].first);
          }
          other.load_state_dict(state);
          expect_close(other(x), expected, 0, "loaded from shards");
          const NoGrad quiet;
          for (const Tensor& p : model.parameters()) {
            if (p.is_sharded()) zero_(p);
          }
          model.load_state_dict(values);  // whole ones: every rank takes its part
          expect_close(model(x), expected, 0, "loaded from whole tensors");
          // Assigned: the parameter looks at the tensor that it was given.
          const NamedTensors assigned = other.state_dict();
          for (const Tensor& p : model.parameters()) {
            if (!p.is_sharded()) reshard(model);
          }
          for (Mlp& layer : model.layers) reshard(layer);
          const NamedTensors own = model.named_parameters();
          for (size_t i = 0; i < own.size(); ++i) set_data(own[i].second, clone(assigned[i].second));
          expect_close(model(x), expected, 0, "assigned");
        }
      }
    }
  });
}

// spec: test_cached_state_dict
TEST(FullyShardedState, TakenOnceItShowsWhatTrainingChanges) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    MlpStack model = seeded(MlpStack(2, 4));
    shard_layers_and_root(model, model.layers, {.mesh = mesh});
    const NamedTensors state = model.state_dict();
    optim::Sgd optimizer(model.named_parameters(), {.lr = 1e-3});
    for (int step = 0; step < 3; ++step) {
      std::vector<std::vector<double>> before;
      for (const auto& [name, p] : state) before.push_back(numbers(to_local(p)));
      optimizer.zero_grad();
      backward(sum(model(pattern({2, 4}, group.rank() + step))));
      optimizer.step();
      const NamedTensors now = model.state_dict();
      bool moved = false;
      for (size_t i = 0; i < state.size(); ++i) {
        const Tensor mine = to_local(state[i].second), current = to_local(now[i].second);
        EXPECT_EQ(mine.raw(), current.raw()) << state[i].first;
        moved |= numbers(mine) != before[i];
      }
      EXPECT_TRUE(moved);
    }
  });
}

// spec: test_rank0_offload_full_state_dict
TEST(FullyShardedState, AllOfItOnOneRank) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const Transformer whole = seeded(Transformer(2));
    Transformer model = clone(whole);
    shard_layers_and_root(model, model.layers, {.mesh = mesh});
    const NamedTensors all = full_state_dict(model), first = full_state_dict(model, {.only_rank = 0});
    const NamedTensors values = whole.state_dict();
    EXPECT_EQ(first.size(), group.rank() == 0 ? values.size() : 0);
    ASSERT_EQ(all.size(), values.size());
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(all[i].first, values[i].first);
      EXPECT_FALSE(all[i].second.is_sharded());
      expect_close(all[i].second, values[i].second, 0, all[i].first);
      if (group.rank() == 0) expect_close(first[i].second, values[i].second, 0, all[i].first);
    }
  });
}

// Draws them from one seed.
void draw_parameters(MlpStack& model) {
  manual_seed(7);
  model.apply([](nn::Module& m) {
    if (auto* linear = dynamic_cast<nn::Linear*>(&m)) linear->reset_parameters();
  });
}

// spec: test_meta_device_{1d,2d}_init, test_invalid_meta_device_init, test_rank0_broadcast_meta_device_init
TEST(FullyShardedState, MemoryMayComeLater) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh one = line(group), two(group, {2, 2}, {"replicate", "shard"});
    const Tensor x = pattern({2, 5}, 1);
    for (const Mesh& mesh : {one, two}) {
      MlpStack whole(2, 5);
      draw_parameters(whole);
      const auto without_memory = [&] {
        MlpStack model(2, 5);
        model.to(kNull);
        shard_layers_and_root(model, model.layers, {.mesh = mesh});
        for (const Tensor& p : model.parameters()) EXPECT_EQ(p.device().type, DeviceType::kNull);
        return model;
      };
      MlpStack forgotten = without_memory();
      const std::string message = message_of<StateError>([&] { forgotten(x); });
      EXPECT_THAT(message, HasSubstr("have no memory yet"));
      EXPECT_THAT(message, HasSubstr("layers.1.out_proj.bias"));

      MlpStack drawn = without_memory();
      drawn.materialize(kCpu);
      draw_parameters(drawn);
      expect_close(drawn(x), whole(x), 0, "drawn as one rank would");

      MlpStack sent = without_memory();
      sent.materialize(kCpu);
      // Only the first rank has values.
      NamedTensors state = whole.state_dict();
      if (group.rank() != 0) {
        for (auto& [name, value] : state) value = zeros(value.sizes());
      }
      load_full_state_dict(sent, state, 0);
      expect_close(sent(x), whole(x), 0, "sent by the first rank");
    }
  });
}

// Makes a model on the device null and fills it part by part; ranks are processes, of which each counts its memory.
template <class Model, class Block, class Config>
void expect_never_whole(const Config& config) {
  const std::vector<int> ended = comm::run_processes(2, [&](comm::Group& group) {
    const auto stats = [] { return cpu_allocator().stats(); };
    const auto start = static_cast<int64_t>(stats().current_bytes);
    cpu_allocator().reset_peak();
    manual_seed(5);
    const RandomStream drawn_from = default_generator().state();
    const auto make = [&] {
      const DeviceScope without_memory(kNull);
      return Model(config);
    };
    Model model = make();
    EXPECT_LT(static_cast<int64_t>(stats().peak_bytes) - start, 64 << 10) << "on null it has no memory";
    for (const auto& [name, module] : model.named_modules()) {
      if (dynamic_cast<Block*>(module)) fully_shard(*module, {.mesh = line(group)});
    }
    fully_shard(model, {.mesh = line(group)});
    model.materialize(kCpu);
    default_generator().restore(drawn_from);
    model.reset_parameters();
    const int64_t most = static_cast<int64_t>(stats().peak_bytes) - start, parts = sizes_of(model).parts;
    EXPECT_GE(most, parts);
    EXPECT_LT(most, parts + parts / 10) << "what a rank had at most, beside its parts";

    default_generator().restore(drawn_from);
    Model whole(config);
    int64_t all = 0;
    const NamedTensors own = model.named_parameters(), expected = whole.named_parameters();
    ASSERT_EQ(own.size(), expected.size());
    for (size_t i = 0; i < own.size(); ++i) {
      EXPECT_EQ(full_tensor(detach(own[i].second)).template to_vector<float>(),
                expected[i].second.template to_vector<float>())
          << own[i].first;
      all += expected[i].second.elems() * 4;
    }
    EXPECT_NEAR(static_cast<double>(parts), static_cast<double>(all) / 2, 0.01 * static_cast<double>(all));
  });
  EXPECT_EQ(ended, (std::vector<int>{0, 0}));
}

TEST(FullyShardedState, AGptThatIsMadeWithoutMemoryIsNeverWholeAndDrawnAsOneRankDrawsIt) {
  expect_never_whole<models::Gpt2, models::Gpt2Block>(
      models::Gpt2Config{.vocab_size = 256, .n_positions = 64, .n_embd = 128, .n_layer = 6, .n_head = 4});
}
TEST(FullyShardedState, ABertThatIsMadeWithoutMemoryIsNeverWholeAndDrawnAsOneRankDrawsIt) {
  expect_never_whole<models::BertForMaskedLM, models::BertLayer>(models::BertConfig{.vocab_size = 301,
                                                                                    .hidden_size = 128,
                                                                                    .num_hidden_layers = 4,
                                                                                    .num_attention_heads = 4,
                                                                                    .intermediate_size = 512,
                                                                                    .max_position_embeddings = 64,
                                                                                    .pad_token_id = 160});
}

// spec: test_dp_state_dict_cpu_offload
TEST(FullyShardedState, PartsThatStayOnTheHostAreLoadedThere) {
  eager::add_sim_device({});
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    MlpStack whole = seeded(MlpStack(2, 5));
    const auto without_memory = [&] {
      MlpStack model(2, 5);
      model.to(kNull);
      shard_layers_and_root(model, model.layers, {.mesh = mesh, .offload = true});
      return model;
    };
    MlpStack model = without_memory();
    model.materialize(kCpu);
    model.load_state_dict(whole.state_dict());
    for (const auto& [name, p] : model.state_dict()) {
      EXPECT_TRUE(p.is_sharded());
      EXPECT_EQ(p.device(), kCpu) << name;
      EXPECT_EQ(to_local(p).device(), kCpu) << name;
    }
    const Tensor x = pattern({2, 5}, 1);
    expect_close(model(x), whole(x), 0, "loaded");
    MlpStack elsewhere = without_memory();
    elsewhere.materialize({DeviceType::kSim, 0});
    const std::string message = message_of<StateError>([&] { elsewhere(x); });
    EXPECT_THAT(message, HasSubstr("parameters stay on the host"));
    EXPECT_THAT(message, HasSubstr("layers.1.out_proj.bias on sim:0"));
  });
}

// spec: test_hsdp_broadcast_across_replicas
TEST(FullyShardedState, ReplicasMayBeMadeEqual) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh mesh(group, {2, 2}, {"replicate", "shard"});
    MlpStack model = seeded(MlpStack(2, 5), 10 * mesh.coordinate("replicate"));
    shard_layers_and_root(model, model.layers, {.mesh = mesh});
    const comm::Group& replicas = mesh.group("replicate");
    for (const Tensor& p : model.parameters()) replicas.broadcast(to_local(detach(p)), replicas.global_rank(0)).wait();
    MlpStack expected = seeded(MlpStack(2, 5), 0);
    const Tensor x = pattern({2, 5}, 1);
    expect_close(model(x), expected(x), 0, "as the first replica");
  });
}

// A model with its optimizer, and what a checkpoint has of both.
template <class M>
struct Job {
  M model;
  optim::AdamW optimizer;
  explicit Job(M from) : model(std::move(from)), optimizer(model.named_parameters(), {.lr = 1e-2}) {}

  void step(const comm::Group& group, int number) {
    // Twelve rows in all, whichever ranks have them.
    const Tensor all = pattern({12, 6}, number);
    const int64_t rows = 12 / group.size();
    optimizer.zero_grad();
    backward(mean(square(model(narrow(all, 0, rows * group.rank(), rows)))));
    optimizer.step();
  }
  void save(const comm::Group& group, const std::filesystem::path& folder) {
    snapshot::State state = snapshot::state_of(model.state_dict(), "model/");
    for (const auto& [key, value] : optimizer.state_dict()) snapshot::add_chunks(state, "optimizer/" + key, value);
    snapshot::save(group, folder, state);
  }
  void load(const comm::Group& group, const std::filesystem::path& folder) {
    // A step of zeros makes the optimizer's states; what it changes is then overwritten.
    for (const Tensor& p : model.parameters()) set_gradient(p, zeros_like(detach(p)));
    optimizer.step();
    optimizer.zero_grad();
    const NamedTensors states = optimizer.state_dict();
    snapshot::State state = snapshot::state_of(model.state_dict(), "model/");
    for (const auto& [key, value] : states) snapshot::add_chunks(state, "optimizer/" + key, value);
    snapshot::load(group, folder, state);
    optimizer.load_state_dict(states);
  }
};

// spec: x_shrink_grow
TEST(FullyShardedState, TrainingGoesOnWithFewerAndWithMoreRanks) {
  const TemporaryFolder folder;
  const MlpStack whole = seeded(MlpStack(2, 6));
  const auto make = [&](comm::Group& group) {
    MlpStack model = clone(whole);
    shard_layers_and_root(model, model.layers, {.mesh = line(group)});
    return Job<MlpStack>(std::move(model));
  };
  std::vector<std::vector<double>> expected;
  run_ranks(1, [&](comm::Group& group) {
    Job<MlpStack> job{clone(whole)};
    for (int step = 0; step < 9; ++step) job.step(group, step);
    for (const Tensor& p : job.model.parameters()) expected.push_back(numbers(p));
  });
  int done = 0;
  for (const int size : {4, 1, 3}) {
    run_ranks(size, [&](comm::Group& group) {
      Job<MlpStack> job = make(group);
      if (done > 0) job.load(group, folder.path() / std::to_string(done));
      for (int step = done; step < done + 3; ++step) job.step(group, step);
      job.save(group, folder.path() / std::to_string(done + 3));
      if (done < 6) return;
      const NamedTensors found = full_state_dict(job.model);
      for (size_t i = 0; i < found.size(); ++i) {
        const auto mine = numbers(found[i].second);
        for (size_t k = 0; k < mine.size(); ++k) ASSERT_NEAR(mine[k], expected[i][k], 2e-5) << found[i].first;
      }
    });
    done += 3;
  }
}

}  // namespace
}  // namespace chorale::fsdp
