#include "chorale/app/sharded/shard_fully.h"

#include <unordered_set>

#include "chorale/api/api.h"
#include "chorale/fsdp/fully_shard.h"
#include "chorale/models/bert.h"
#include "chorale/models/gpt2.h"
#include "chorale/sharding/sharded.h"

namespace chorale::app {
namespace {

class ShardedModel final : public train::FullSharding {
 public:
  explicit ShardedModel(nn::Module& model) : model_(model) {}
  void set_sync(bool wanted) override { fsdp::set_requires_gradient_sync(model_, wanted); }
  double seconds_waited() override { return fsdp::seconds_waited(model_); }
  Sizes sizes() override {
    const fsdp::Sizes all = fsdp::sizes_of(model_);
    return {
        .parts = all.parts, .gradients = all.gradients, .gathered = all.gathered, .largest_block = all.largest_block};
  }
  void fill(const NamedTensors& wholes) override {
    const NoGrad quiet;
    std::unordered_set<const Tensor::Impl*> seen;
    size_t next = 0;
    for (const auto& [name, x] : model_.named_parameters()) {
      if (!seen.insert(x.impl()).second) continue;
      const Tensor whole =
          wholes.empty() ? Tensor::empty(x.sizes(), x.dtype()) : to(wholes.at(next++).second, x.dtype());
      copy_(sharding::local_of(x), sharding::local_of(distribute(whole, mesh_of(x), placements_of(x))));
    }
  }

 private:
  nn::Module& model_;
};

bool is_block(const nn::Module& module) {
  return dynamic_cast<const models::Gpt2Block*>(&module) || dynamic_cast<const models::BertLayer*>(&module);
}

}  // namespace

std::unique_ptr<train::FullSharding> shard_fully(nn::Module& model, const train::JobRanks& ranks,
                                                 const train::TrainOptions& options, Device device) {
  const train::JobRanks::Shards& shards = *ranks.shards();
  const bool has_replicas = shards.replicas > 1;
  const auto split = [&] { return has_replicas ? ranks.mesh().slice({"replicate", "shard"}) : ranks.mesh()["dp"]; };
  const Mesh mesh = ranks.is_split() ? split()
                    : has_replicas   ? Mesh(ranks.all(), {shards.replicas, shards.ranks}, {"replicate", "shard"})
                                     : Mesh(ranks.all(), {shards.ranks}, {"shard"});
  fsdp::Options how{.mesh = mesh, .offload = options.offload, .device = device};
  if (options.compress == "bf16") how.mixed_precision.reduce = DType::kBF16;
  for (const auto& [name, module] : model.named_modules()) {
    if (is_block(*module)) fsdp::fully_shard(*module, how);
  }
  fsdp::fully_shard(model, how);
  return std::make_unique<ShardedModel>(model);
}

}  // namespace chorale::app
