// Fully sharded over tensor parallel training: section B8 of spec/tensor-parallel.md, meshes of B2 of
// spec/sharded-training.md.
#include "chorale/parallel/tensor_parallel.h"
#include "chorale/fsdp/fsdp_test_util.h"

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
  Recomputed whole = seeded(Recomputed(dim));
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
    const Tensor x = pattern({2, dim}, replica + 10 * step);
    const Tensor a = sum(reference(x)), b = sum(mine(x));
    expect_close(b, a, 1e-4, concat("loss of step ", step, " of ", dim));
    backward(a);
    backward(b);
    one.step();
    two.step();
    if (testing::Test::HasFatalFailure()) return;
  }
  const NoGrad quiet;
  for (size_t i = 0; i < 12; ++i) {
    expect_close(full_tensor(detach(mine.parameters()[i])), reference.parameters()[i], 1e-3,
                 mine.named_parameters()[i].first);
  }
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

}  // namespace
}  // namespace chorale::fsdp
