// Elastic jobs whose ranks each have a part of the model: what is made for the ranks of an epoch, the copies that ranks
// keep of each other's parts, and how a state is found again when ranks are gone.
//
// Note [Copies]
// Every few steps each rank packs its parts and sends them to the memory of its right neighbour: whichever rank dies,
// another one has its parts of that step. There are two such copies, and the one that is known to be whole is never
// written over: a copy that a death interrupts leaves the one before. It is known by the next commit point, to which
// every rank comes behind its copy, or since the state was put together from it.
#pragma once

#include <array>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chorale/elastic/parts.h"
#include "chorale/optim/optimizer.h"

namespace chorale::elastic {

// What is trained, for the ranks of one epoch.
struct Sharded {
  NamedTensors parameters;  // as the optimizer has them: sharded, or whole and the same on all ranks
  NamedTensors buffers{};   // each rank's own
  optim::Optimizer* optimizer = nullptr;
  std::shared_ptr<void> owner{};  // of all that; it ends when the ranks have changed
  bool has_replicas = false;      // other ranks have the same parts, so copies are not needed
};

struct ShardedOptions {
  int64_t copy_every = 10;         // steps between copies; 0: none, where replicas or files are enough
  std::filesystem::path folder{};  // of checkpoints, for when copies are lost, too; empty: none. A job begins with what
                                   // is there.
  int64_t save_every = 100;        // steps between these, the first before the first step; 0: none
  // Called on all ranks where parts are lost and there is no checkpoint in `folder`: the job goes on, from its first
  // step, with what was made for the ranks, to which the program itself gives values. Empty: run() throws.
  std::function<void()> lost{};
};

// What copies cost one rank.
struct CopyCosts {
  int64_t count = 0, bytes = 0;  // of the last one
  double ms = 0, longest_ms = 0;
  std::string text() const;
};

class Shards {
 public:
  using Make = std::function<Sharded(const comm::Group& group)>;
  Shards(Make make, ShardedOptions options);

  const Sharded& now() const { return now_; }
  const ShardedOptions& options() const { return options_; }
  const CopyCosts& costs() const { return costs_; }

  // What one rank knows by itself, as text: random numbers, buffers and the like.
  using Personal = std::function<std::string()>;
  // Where this rank stands in the ranks of an epoch.
  struct Start {
    Moment moment;
    std::string personal;  // of it: this rank's own where it had any part of it, else another's
    bool is_from_file = false, is_lost = false;
  };
  // Makes what these ranks train, with the newest state of which all is there: what they have, else a copy, else a
  // checkpoint; else as it was made, if the job `begins` or the options say what happens where the state is lost.
  // `live`: the state that this rank has. Until this returns it has it, whatever is thrown. StateError where the state
  // is lost.
  Start enter(const comm::Group& group, int64_t epoch, std::optional<Moment> live, const Personal& personal,
              bool begins);

  bool copy_is_due(const Moment& moment, int ranks) const;
  // Each rank sends a copy of its parts to its keeper, if it has one (by rank; -1: none). `midway` is called when the
  // older copy is gone and the new one is not there.
  void copy(const comm::Group& group, const Moment& moment, const Personal& personal, const std::vector<int>& keepers,
            const std::function<void()>& midway);
  // All ranks have come to a commit point.
  void note_commit();
  bool save_is_due(const Moment& moment) const;
  void save(const comm::Group& group, const Moment& moment, const Personal& personal);

 private:
  struct Copy {
    std::optional<Cut> cut{};  // nothing: it is not complete
    Tensor own{};
    std::vector<Tensor> others{};
  };
  std::vector<Source> sources(const std::optional<Moment>& live, const Personal& personal) const;
  Start load(const comm::Group& group, const Sharded& fresh, int64_t epoch) const;

  const Make make_;
  const ShardedOptions options_;
  Sharded now_;
  int64_t split_ = 0;  // the epoch for whose ranks it was made
  std::array<Copy, 2> copies_;
  size_t whole_ = 0;         // of the copies: it must stay
  bool has_copied_ = false;  // since the last commit point
  std::optional<Cut> last_copied_;
  int64_t last_saved_ = 0;  // the step; -1: there is no checkpoint
  CopyCosts costs_;
};

}  // namespace chorale::elastic
