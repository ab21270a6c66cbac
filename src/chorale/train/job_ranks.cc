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
  CHORALE_CHECK(options.tp == 1 || options.hybrid.empty(),
                "[train] --hybrid says how replicas of whole layers are shared "
                "out; with --tp ",
                options.tp, " leave it out: ranks with the same part of a layer share that");
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

void check_ranks(const TrainOptions& options, int64_t ranks) {
  const int64_t parts = options.tp;
  CHORALE_CHECK(ranks % parts == 0, "[train] --tp ", parts, " does not divide the ", ranks,
                " ranks of the job; choose --ranks so that it does");
  CHORALE_CHECK(options.dp == 0 || options.dp * parts == ranks, "[train] --dp ", options.dp, " and --tp ", parts,
                " are ", options.dp * parts, " ranks, but the job has ", ranks);
  CHORALE_CHECK(parts > 1 || !options.sequence_parallel, "[train] --sequence-parallel splits what --tp leaves whole; ",
                "choose --tp 2 or more with it");
  check_shards(options);
  if (options.hybrid.empty()) return;
  const JobRanks::Shards shards = hybrid_of(options.hybrid);
  const int64_t named = int64_t{shards.replicas} * shards.ranks;
  CHORALE_CHECK(named == ranks, "[train] --hybrid ", options.hybrid, " are ", named, " ranks, but the job has ", ranks);
}

JobRanks::JobRanks(const comm::Group& all, const TrainOptions& options) : all_(all) {
  check_ranks(options, all.size());
  const auto parts = static_cast<int>(options.tp);
  if (options.fsdp) shards_ = options.hybrid.empty() ? Shards{1, all.size() / parts} : hybrid_of(options.hybrid);
  if (parts == 1) return;
  mesh_.emplace(all, std::vector<int>{all.size() / parts, parts}, std::vector<std::string>{"dp", "tp"});
}

}  // namespace chorale::train
