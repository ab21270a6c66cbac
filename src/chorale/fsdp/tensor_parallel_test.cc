// Fully sharded over tensor parallel training: section B8 of spec/tensor-parallel.md, meshes of B2 of
// spec/sharded-training.md.
#include "chorale/fsdp/fsdp_test_util.h"
#include "chorale/fsdp/state.h"
#include "chorale/parallel/transformer_test_util.h"
#include "chorale/snapshot/snapshot.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::fsdp {
namespace {

const parallel::Plan& plan() {
  static const parallel::Plan entries{{"layers.*.in_proj", parallel::Colwise()},
                                      {"layers.*.out_proj", parallel::Rowwise()}};
  return entries;
}

struct Recomputed : nn::Module {
  std::vector<Mlp> layers;
  bool recomputes = false;
  CHORALE_MODULE(Recomputed, layers)
  explicit Recomputed(int64_t dim) {
    for (int i = 0; i < 3; ++i) layers.emplace_back(dim);
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (Mlp& layer : layers) {
      y = recomputes ? checkpoint([&](const std::vector<Tensor>& in) { return std::vector{layer(in[0])}; }, {y})[0]
                     : layer(y);
    }
    return y;
  }
};

// Shards of `mesh` over the parts that tensor parallel training along "tp" has made, against data-parallel training.
void expect_parity_over_parts(const comm::Group& group, const Mesh& all, const std::vector<std::string>& data,
                              int64_t dim, ReshardAfterForward policy, bool recomputes) {
  const Mesh tp = all["tp"], dp = all.slice(data);
  int replica = 0;
  for (const std::string& name : data) replica = replica * all.shape()[all.dimension(name)] + all.coordinate(name);
  // In f32 rounding alone parts the two: Adam makes a whole step of a gradient that is next to nothing, and a unit of
  // leaky_relu then lies on the other side.
  Recomputed whole = seeded(Recomputed(dim));
  whole.to(DType::kF64);
  whole.recomputes = recomputes;
  DistributedDataParallel<Recomputed> reference(clone(whole), group);
  Recomputed mine = clone(whole);
  parallel::tensor_parallel(mine, tp, plan());
  shard_layers_and_root(mine, mine.layers, {.mesh = dp, .reshard_after_forward = policy});
  for (const Tensor& p : mine.parameters()) EXPECT_EQ(mesh_of(p).dims(), data.size() + 1);
  optim::Adam one(reference.named_parameters(), {.lr = 1e-2}), two(mine.named_parameters(), {.lr = 1e-2});
  for (int step = 0; step < 5; ++step) {
    one.zero_grad();
    two.zero_grad();
    // The same on the ranks of one replica.
    const Tensor x = pattern({2, dim}, replica + 10 * step, DType::kF64);
    const Tensor a = sum(reference(x)), b = sum(mine(x));
    expect_close(b, a, 1e-9, concat("loss of step ", step, " of ", dim));
    backward(a);
    backward(b);
    one.step();
    two.step();
    if (testing::Test::HasFatalFailure()) return;
  }
  const NoGrad quiet;
  for (size_t i = 0; i < 12; ++i) {
    expect_close(full_tensor(detach(mine.parameters()[i])), reference.parameters()[i], 1e-9,
                 mine.named_parameters()[i].first);
  }
}

// spec: test_shard_dtensor_parameters
TEST(FullyShardedOverTensorParallel, PartsAreCutFurther) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh all(group, {2, 2}, {"dp", "tp"});
    const MlpStack whole = seeded(MlpStack(2, 6, 3));
    MlpStack model = clone(whole);
    parallel::tensor_parallel(model, all["tp"], plan());
    for (Mlp& layer : model.layers) fully_shard(layer, {.mesh = all["dp"]});
    fully_shard(model, {.mesh = all["dp"]});
    const NoGrad quiet;
    // Rows of a part that has nine of eighteen: five and four.
    const op::Chunk of_tp = op::chunk_of(18, 2, all.coordinate("tp")), of_dp = op::chunk_of(9, 2, all.coordinate("dp"));
    const int64_t first = of_tp.first + of_dp.first, columns = 9 * all.coordinate("tp"),
                  rows = 3 * all.coordinate("dp");
    const NamedTensors own = model.named_parameters(), reference = whole.named_parameters();
    ASSERT_EQ(own.size(), 8u);
    for (size_t i = 0; i < own.size(); ++i) {
      const auto& [name, p] = own[i];
      const Tensor& before = reference[i].second;
      ASSERT_TRUE(p.is_sharded()) << name;
      EXPECT_EQ(mesh_of(p).names(), (std::vector<std::string>{"dp", "tp"})) << name;
      EXPECT_EQ(p.sizes(), before.sizes()) << name;
      EXPECT_EQ(p.strides(), before.strides()) << name;
      Placements placements;
      Tensor part;
      if (name.ends_with("out_proj.weight")) {
        placements = {shard(0), shard(1)};
        part = narrow(narrow(before, 0, rows, 3), 1, columns, 9);
      } else if (name.ends_with("out_proj.bias")) {
        placements = {shard(0), replicate()};
        part = narrow(before, 0, rows, 3);
      } else {
        placements = {strided_shard(0, 2), shard(0)};
        part = narrow(before, 0, first, of_dp.size);
      }
      EXPECT_EQ(placements_of(p), placements) << name;
      expect_close(to_local(detach(p)), detach(part), 0, name);
    }
  });
}

// spec: test_train_parity_2d_mlp
TEST(FullyShardedOverTensorParallel, TrainsAsDataParallelTrainingDoes) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh mesh(group, {2, 2}, {"dp", "tp"});
    for (const int64_t dim : {3, 16, 17}) {
      for (const bool reshards : {true, false}) {
        for (const bool recomputes : {true, false}) {
          expect_parity_over_parts(group, mesh, {"dp"}, dim, reshards, recomputes);
        }
      }
    }
  });
}

// spec: test_2d_mlp_with_nd_mesh, test_3d_mlp_with_nd_mesh
TEST(FullyShardedOverTensorParallel, AlsoOnMeshesOfEightRanks) {
  run_ranks(8, [](comm::Group& group) {
    const Mesh two(group, {4, 2}, {"dp", "tp"});
    expect_parity_over_parts(group, two, {"dp"}, 16, {}, false);
    const Mesh three(group, {2, 2, 2}, {"replicate", "shard", "tp"});
    expect_parity_over_parts(group, three, {"replicate", "shard"}, 16, {}, false);
  });
}

// ---- the transformer, sequence parallel

using TransformerOfCatalogue = parallel::catalogue::Transformer;

// The dimension by which a rank's part is cut further.
using ShardDim = std::function<std::optional<int64_t>(const Tensor&)>;
std::optional<int64_t> last_dim(const Tensor& parameter) {
  return parameter.dims() == 2 ? std::optional<int64_t>(1) : std::nullopt;
}

TransformerOfCatalogue shards_of_parts(const Mesh& mesh, bool tied, const ShardDim& dim = {}) {
  TransformerOfCatalogue model = parallel::catalogue::make(tied, 3);
  parallel::tensor_parallel(model, mesh["tp"], parallel::catalogue::plan_of(true));
  shard_layers_and_root(model, model.layers, {.mesh = mesh["dp"], .shard_dim = dim});
  return model;
}

// The same on the ranks of one replica.
Tensor ids_of_step(int replica, int step) { return ids({4, 8}, replica + 10 * step, parallel::catalogue::kVocabulary); }
template <class M>
Tensor loss_of_step(M& model, int replica, int step) {
  return mean(square(sub(model(ids_of_step(replica, step)), pattern({4, 8, 8}, step, DType::kF64))));
}

// spec: test_train_parity_2d_transformer
TEST(FullyShardedOverTensorParallel, ATransformerOverTokensTrainsAsDataParallelTrainingDoes) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh mesh(group, {2, 2}, {"dp", "tp"});
    const int replica = mesh.coordinate("dp");
    for (const bool tied : {true, false}) {
      const ShardDim dim = tied ? ShardDim() : ShardDim(last_dim);
      SCOPED_TRACE(concat(tied ? "tied, " : "", dim ? "cut by columns" : "cut by rows"));
      DistributedDataParallel<TransformerOfCatalogue> reference(parallel::catalogue::make(tied, 3), group);
      TransformerOfCatalogue mine = shards_of_parts(mesh, tied, dim);
      optim::AdamW one(reference.named_parameters(), {.lr = 1e-2}), two(mine.named_parameters(), {.lr = 1e-2});
      for (int step = 0; step < 5; ++step) {
        one.zero_grad();
        two.zero_grad();
        const Tensor a = loss_of_step(reference, replica, step), b = loss_of_step(mine, replica, step);
        expect_close(b, a, 1e-10, concat("loss of step ", step));
        backward(a);
        backward(b);
        const NoGrad quiet;
        const NamedTensors p = mine.named_parameters(), q = reference.named_parameters();
        ASSERT_EQ(p.size(), q.size());
        ASSERT_EQ(p.size(), tied ? 40u : 41u);
        for (size_t i = 0; i < p.size(); ++i) {
          expect_close(full_tensor(gradient(p[i].second)), gradient(q[i].second), 1e-9,
                       concat("gradient of ", p[i].first, " in step ", step));
        }
        const Tensor& positions = mine.pos_embeddings.weight;
        EXPECT_EQ(placements_of(gradient(positions)), placements_of(positions));
        EXPECT_EQ(placements_of(gradient(positions)).back(), shard(0)) << "along tp";
        one.step();
        two.step();
        for (size_t i = 0; i < p.size(); ++i) {
          expect_close(full_tensor(detach(p[i].second)), q[i].second, 1e-7, concat(p[i].first, " after step ", step));
        }
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  });
}

// ---- states

// A model of shards over parts, or of shards alone over all ranks, with its optimizer.
template <class M>
struct Sharded2d {
  M model;
  optim::AdamW optimizer;
  explicit Sharded2d(M from) : model(std::move(from)), optimizer(model.named_parameters(), {.lr = 1e-2}) {}

  double step(const Tensor& x) {
    optimizer.zero_grad();
    const Tensor loss = mean(square(sub(model(x), 0.5)));
    backward(loss);
    optimizer.step();
    return loss.item<double>();
  }
  // All of the optimizer's states in ordinary tensors.
  NamedTensors full_optimizer_state() const {
    NamedTensors all = optimizer.state_dict();
    const NoGrad quiet;
    for (auto& [name, value] : all) {
      if (value.is_sharded()) value = full_tensor(value);
    }
    return all;
  }
  // `states`: what optimizer.state_dict() gave, which has copies of numbers.
  snapshot::State state(const NamedTensors& states) {
    snapshot::State all = snapshot::state_of(model.state_dict(), "model/");
    for (const auto& [key, value] : states) snapshot::add_chunks(all, "optimizer/" + key, value);
    return all;
  }
};

void expect_same_states(const NamedTensors& found, const NamedTensors& wanted, double tolerance,
                        const std::string& what) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].first, wanted[i].first);
    EXPECT_FALSE(found[i].second.is_sharded()) << found[i].first;
    expect_close(found[i].second, wanted[i].second, tolerance, concat(what, " ", found[i].first));
  }
}

// `over_parts` and `alone` make the same model, sharded over two dimensions and over one.
template <class M>
void expect_states_as_of_one_dimension(const std::function<M(double)>& over_parts,
                                       const std::function<M(double)>& alone, const std::function<Tensor(int)>& input,
                                       bool is_first) {
  Sharded2d<M> two(over_parts(1)), one(alone(1));
  expect_same_states(full_state_dict(two.model), full_state_dict(one.model), 0, "before");
  for (int step = 0; step < 2; ++step) EXPECT_NEAR(two.step(input(step)), one.step(input(step)), 1e-9);
  expect_same_states(full_state_dict(two.model), full_state_dict(one.model), 1e-7, "after two steps");
  expect_same_states(two.full_optimizer_state(), one.full_optimizer_state(), 1e-7, "optimizer");
  // A model with other values takes all of the states of the other, from every rank or from the first, and goes on.
  const NamedTensors values = full_state_dict(one.model), states = one.full_optimizer_state();
  for (const bool from_first : {false, true}) {
    Sharded2d<M> other(over_parts(50));
    NamedTensors sent = values;
    // What other ranks have is ignored then.
    if (from_first && !is_first) {
      for (auto& [name, value] : sent) value = zeros(value.sizes(), value.dtype());
    }
    load_full_state_dict(other.model, sent, from_first ? std::optional<int>(0) : std::nullopt);
    other.optimizer.load_state_dict(states);
    expect_same_states(full_state_dict(other.model), values, 0, "loaded");
    expect_same_states(other.full_optimizer_state(), states, 0, "loaded optimizer");
    Sharded2d<M> same(alone(60));
    load_full_state_dict(same.model, values);
    same.optimizer.load_state_dict(states);
    for (int step = 2; step < 4; ++step) EXPECT_NEAR(other.step(input(step)), same.step(input(step)), 1e-8);
  }
}

template <class M>
void scale(M& model, double factor) {
  const NoGrad quiet;
  for (const Tensor& p : model.parameters()) mul_(p, factor);
}

// spec: test_2d_{state_dict,load_state_dict,optim_state_dict}, test_{fsdp1,fully_shard}_tp_2d_set_full_state_dict
// spec: test_train_parity_2d_transformer_checkpoint_resume
TEST(FullyShardedOverTensorParallel, StatesAreThoseOfOneDimensionAndTrainingGoesOnFromThem) {
  const TemporaryFolder folder;
  run_ranks(4, [&](comm::Group& group) {
    const Mesh mesh(group, {2, 2}, {"dp", "tp"});
    for (const int64_t dim : {6, 5}) {  // even and uneven
      const auto whole = [&](double seed) {
        MlpStack model(2, dim);
        model.to(DType::kF64);
        return seeded(std::move(model), seed);
      };
      expect_states_as_of_one_dimension<MlpStack>(
          [&](double seed) {
            MlpStack model = whole(seed);
            parallel::tensor_parallel(model, mesh["tp"], plan());
            shard_layers_and_root(model, model.layers, {.mesh = mesh["dp"]});
            return model;
          },
          [&](double seed) {
            MlpStack model = whole(seed);
            shard_layers_and_root(model, model.layers, {.mesh = line(group)});
            return model;
          },
          [&](int step) {
            return pattern({4, dim}, step, DType::kF64);
          },
          group.rank() == 0);
      if (testing::Test::HasFatalFailure()) return;
    }
    const auto tokens = [](int step) { return ids_of_step(0, step); };
    expect_states_as_of_one_dimension<TransformerOfCatalogue>(
        [&](double seed) {
          TransformerOfCatalogue model = shards_of_parts(mesh, false);
          scale(model, seed == 1 ? 1 : 1 / seed);
          return model;
        },
        [&](double) {
          TransformerOfCatalogue model = parallel::catalogue::make(false, 3);
          shard_layers_and_root(model, model.layers, {.mesh = line(group)});
          return model;
        },
        tokens, group.rank() == 0);
    if (testing::Test::HasFatalFailure()) return;
    // A run that is saved in the middle goes on from the folder with the losses that it would have had, also where the
    // output's weight is the table's.
    for (const bool tied : {true, false}) {
      Sharded2d<TransformerOfCatalogue> one(shards_of_parts(mesh, tied));
      std::vector<double> expected;
      for (int step = 0; step < 6; ++step) {
        const double loss = one.step(tokens(step));
        if (step >= 3) expected.push_back(loss);
        if (step == 2) snapshot::save(group, folder / concat("at-3-", tied), one.state(one.optimizer.state_dict()));
      }
      Sharded2d<TransformerOfCatalogue> two(shards_of_parts(mesh, tied));
      scale(two.model, 0.1);
      two.step(tokens(9));  // which makes states
      const NamedTensors states = two.optimizer.state_dict();
      snapshot::State all = two.state(states);
      snapshot::load(group, folder / concat("at-3-", tied), all);
      two.optimizer.load_state_dict(states);
      std::vector<double> found;
      for (int step = 3; step < 6; ++step) found.push_back(two.step(tokens(step)));
      EXPECT_EQ(found, expected);
    }
  });
}

}  // namespace
}  // namespace chorale::fsdp
