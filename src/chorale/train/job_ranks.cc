#include "chorale/train/job_ranks.h"

#include "chorale/base/error.h"

namespace chorale::train {

JobRanks::JobRanks(const comm::Group& all, const TrainOptions& options) : all_(all) {
  const int64_t size = all.size(), parts = options.tp;
  CHORALE_CHECK(size % parts == 0, "[train] --tp ", parts, " does not divide the ", size,
                " ranks of the job; choose --ranks so that it does");
  CHORALE_CHECK(options.dp == 0 || options.dp * parts == size, "[train] --dp ", options.dp, " and --tp ", parts,
                " are ", options.dp * parts, " ranks, but the job has ", size);
  CHORALE_CHECK(parts > 1 || !options.sequence_parallel, "[train] --sequence-parallel splits what --tp leaves whole; ",
                "choose --tp 2 or more with it");
  if (parts == 1) return;
  CHORALE_CHECK(options.compress != "powersgd", "[train] --compress powersgd does not know parts of a model; choose ",
                "another with --tp ", parts);
  mesh_.emplace(all, std::vector<int>{static_cast<int>(size / parts), static_cast<int>(parts)},
                std::vector<std::string>{"dp", "tp"});
}

}  // namespace chorale::train
