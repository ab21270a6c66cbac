#include "chorale/train/job_ranks.h"

#include <charconv>

#include "chorale/base/error.h"

namespace chorale::train {
namespace {

void check_shards(const TrainOptions& options) {
  CHORALE_CHECK(options.fsdp || (options.hybrid.empty() && !options.offload), "[train] --",
                options.offload ? "offload" : "hybrid", " says how --fsdp shares a model out; give --fsdp with it");
  if (!options.fsdp) return;
  CHORALE_CHECK(options.compress != "powersgd",
                "[train] --compress powersgd keeps on every rank what its factors missed of all gradients, as much as "
                "the whole model, which --fsdp is there to avoid; choose --compress bf16, or leave it out");
}

}  // namespace

JobRanks::Shards hybrid_of(const std::string& text) {
  JobRanks::Shards shards;
  const char *begin = text.data(), *end = begin + text.size();
  const auto first = std::from_chars(begin, end, shards.replicas);
  const bool has_x = first.ec == std::errc() && first.ptr != end && *first.ptr == 'x';
  const auto second = std::from_chars(has_x ? first.ptr + 1 : end, end, shards.ranks);
  CHORALE_CHECK(has_x && second.ec == std::errc() && second.ptr == end && shards.replicas > 0 && shards.ranks > 0,
                "[train] --hybrid is replicas by ranks that share one, such as 2x4, not '", text, "'");
  return shards;
}

void check_ranks(const TrainOptions& options, int64_t ranks) {
  const int64_t parts = options.tp;
  CHORALE_CHECK(ranks % parts == 0, "[train] --tp ", parts, " does not divide the ", ranks,
                " ranks of the job; choose --ranks so that it does");
  CHORALE_CHECK(options.dp == 0 || options.dp * parts == ranks, "[train] --dp ", options.dp, " and --tp ", parts,
                " are ", options.dp * parts, " ranks, but the job has ", ranks);
  CHORALE_CHECK(parts > 1 || !options.sequence_parallel, "[train] --sequence-parallel splits what --tp leaves whole; ",
                "choose --tp 2 or more with it");
  CHORALE_CHECK(parts == 1 || options.fsdp || options.optimizer != "lamb",
                "[train] --optimizer lamb takes the norms of whole tensors, of which --tp leaves parts on each rank; ",
                "choose another one, or add --fsdp, which knows what belongs together");
  check_shards(options);
  if (options.hybrid.empty()) return;
  const JobRanks::Shards shards = hybrid_of(options.hybrid);
  const int64_t named = product("ranks", {shards.replicas, shards.ranks, parts});
  CHORALE_CHECK(named == ranks, "[train] --hybrid ", options.hybrid, parts > 1 ? concat(" and --tp ", parts) : "",
                " are ", named, " ranks, but the job has ", ranks);
}

JobRanks JobRanks::of_any_number(const comm::Group& all, const TrainOptions& options) {
  check_shards(options);
  const int replicas = options.hybrid.empty() ? 1 : hybrid_of(options.hybrid).replicas, ranks = all.size();
  return ranks % replicas == 0 ? JobRanks(all, Shards{replicas, ranks / replicas}) : JobRanks(all, Shards{1, ranks});
}

JobRanks::JobRanks(const comm::Group& all, const TrainOptions& options) : all_(all) {
  check_ranks(options, all.size());
  const auto parts = static_cast<int>(options.tp);
  if (options.fsdp) shards_ = options.hybrid.empty() ? Shards{1, all.size() / parts} : hybrid_of(options.hybrid);
  if (parts == 1) return;
  if (!shards_ || shards_->replicas == 1) {
    mesh_.emplace(all, std::vector<int>{all.size() / parts, parts}, std::vector<std::string>{"dp", "tp"});
  } else {
    mesh_.emplace(all, std::vector<int>{shards_->replicas, shards_->ranks, parts},
                  std::vector<std::string>{"replicate", "shard", "tp"});
    mesh_->slice({"replicate", "shard"}).flatten("dp");
  }
  replicas_ = (*mesh_)["dp"];
}

}  // namespace chorale::train
