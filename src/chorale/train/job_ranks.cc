#include "chorale/train/job_ranks.h"

#include <charconv>

#include "chorale/base/error.h"

namespace chorale::train {
namespace {

void check_shards(const TrainOptions& options) {
  CHORALE_CHECK(options.fsdp || (options.hybrid.empty() && !options.offload), "[train] --",
                options.offload ? "offload" : "hybrid", " says how --fsdp shares a model out; give --fsdp with it");
  if (!options.fsdp) return;
  CHORALE_CHECK(options.device == "auto" || options.device == "cpu", "[train] --fsdp computes on the CPU, not on ",
                options.device, "; leave --device out");
  CHORALE_CHECK(options.tp == 1, "[train] --fsdp and --tp ", options.tp, " both share the model out; choose one");
  CHORALE_CHECK(options.compress == "none", "[train] --compress ", options.compress,
                " is for gradients of whole models; leave it out with --fsdp");
  CHORALE_CHECK(!options.compile, "[train] --compile does not know layers that are gathered; leave it out with --fsdp");
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

JobRanks::JobRanks(const comm::Group& all, const TrainOptions& options) : all_(all) {
  const int64_t size = all.size(), parts = options.tp;
  CHORALE_CHECK(size % parts == 0, "[train] --tp ", parts, " does not divide the ", size,
                " ranks of the job; choose --ranks so that it does");
  CHORALE_CHECK(options.dp == 0 || options.dp * parts == size, "[train] --dp ", options.dp, " and --tp ", parts,
                " are ", options.dp * parts, " ranks, but the job has ", size);
  CHORALE_CHECK(parts > 1 || !options.sequence_parallel, "[train] --sequence-parallel splits what --tp leaves whole; ",
                "choose --tp 2 or more with it");
  check_shards(options);
  if (options.fsdp) {
    shards_ = options.hybrid.empty() ? Shards{1, static_cast<int>(size)} : hybrid_of(options.hybrid);
    CHORALE_CHECK(int64_t{shards_->replicas} * shards_->ranks == size, "[train] --hybrid ", options.hybrid, " are ",
                  int64_t{shards_->replicas} * shards_->ranks, " ranks, but the job has ", size);
  }
  if (parts == 1) return;
  CHORALE_CHECK(options.compress != "powersgd", "[train] --compress powersgd does not know parts of a model; choose ",
                "another with --tp ", parts);
  mesh_.emplace(all, std::vector<int>{static_cast<int>(size / parts), static_cast<int>(parts)},
                std::vector<std::string>{"dp", "tp"});
}

}  // namespace chorale::train
