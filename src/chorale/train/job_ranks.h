// The ranks of a job: replicas, which share each batch, and in each replica the ranks that share its model.
#pragma once

#include <optional>

#include "chorale/comm/mesh.h"
#include "chorale/train/options.h"

namespace chorale::train {

// InvalidArgument where so many ranks cannot be shared out as the options say.
void check_ranks(const TrainOptions& options, int64_t ranks);

class JobRanks {
 public:
  // Every rank of the group, which must outlive it, calls it. InvalidArgument where the options ask for another number
  // of ranks than there are.
  JobRanks(const comm::Group& all, const TrainOptions& options);
  // The ranks of a fully sharded job, which come and go: as many replicas as the options say where they divide the
  // ranks, else one.
  static JobRanks of_any_number(const comm::Group& all, const TrainOptions& options);

  const comm::Group& all() const { return all_; }
  // Those that have the same part of the model as this rank, one of each replica.
  const comm::Group& replicas() const { return replicas_ ? replicas_->group(size_t{0}) : all_; }
  // How many ranks share a model.
  int parts() const { return mesh_ ? mesh_->shape().back() : 1; }
  bool is_split() const { return mesh_.has_value(); }
  // Fully sharded training: replicas by ranks that share one.
  struct Shards {
    int replicas = 1, ranks = 1;
  };
  const std::optional<Shards>& shards() const { return shards_; }
  // Whether no rank has the whole model.
  bool has_parts() const { return is_split() || shards_; }
  // "dp" by "tp"; only where the model is split. Where replicas of it are fully sharded "dp" stands for "replicate" by
  // "shard".
  const comm::Mesh& mesh() const { return *mesh_; }

 private:
  JobRanks(const comm::Group& all, Shards shards) : all_(all), shards_(shards) {}

  const comm::Group& all_;
  std::optional<comm::Mesh> mesh_, replicas_;
  std::optional<Shards> shards_;
};

// What --hybrid says. InvalidArgument where that is not two whole numbers with an x between them.
JobRanks::Shards hybrid_of(const std::string& text);

}  // namespace chorale::train
