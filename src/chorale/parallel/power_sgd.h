// PowerSGD (Vogels, Karimireddy, Jaggi 2019): a gradient of n x m numbers travels as two factors, n x r and m x r. One
// step of the power method per iteration finds them; what they miss is added to the next gradient, and their directions
// are where the next search starts.
#pragma once

#include <map>

#include "chorale/parallel/comm_hooks.h"

namespace chorale::parallel {

struct PowerSgdOptions {
  int64_t rank = 1;
  // The first steps average gradients exactly, while they are large and their directions change.
  int64_t start_iteration = 1000;
  // A matrix is compressed only if its factors are smaller by more than this.
  double min_compression_rate = 2;
  bool error_feedback = true;  // with this or the next one, start_iteration must be at least 2: buckets are final then
  bool warm_start = true;
  uint64_t seed = 0;  // equal on all ranks
};

// What PowerSGD knows from step to step; shared by the hook and the code that saves it. Where ranks die, what their
// factors missed is lost with them; a rank that joins begins with the directions that the others have found.
class PowerSgd final : public HookState, public std::enable_shared_from_this<PowerSgd> {
 public:
  explicit PowerSgd(const PowerSgdOptions& options = {});

  const PowerSgdOptions& options() const { return options_; }
  int64_t iteration() const { return now_.iteration; }
  // Bytes of all gradients so far, and of what was handed to all-reduce in their place.
  int64_t gradient_bytes() const { return now_.gradient_bytes; }
  int64_t sent_bytes() const { return now_.sent_bytes; }

  // Everything, options too; the group is the wrapper's and no part of it, which a line of the log says on saving and
  // on loading (CHORALE_DEBUG=INFO).
  std::vector<std::pair<std::string, Tensor>> state_dict() const;
  void load_state_dict(const std::vector<std::pair<std::string, Tensor>>& state);

  void begin() override { before_ = now_; }
  void commit() override { before_ = {}; }
  void abort() override { now_ = before_; }
  std::string save() const override;
  void load(const std::string& saved) override;

 private:
  friend CommHook power_sgd_hook(std::shared_ptr<PowerSgd> state);
  friend CommHook batched_power_sgd_hook(std::shared_ptr<PowerSgd> state);

  // What is kept of a matrix. Both are undefined before the first time.
  struct Memory {
    Tensor error, q;
  };
  struct Matrix;
  bool compresses(int64_t rows, int64_t columns) const;
  comm::Future reduce(GradBucket& bucket, bool batched);
  Matrix factorize(const Tensor& target, const Tensor& values, size_t key, int64_t iteration);
  Tensor start_of(const Matrix& matrix, int64_t iteration) const;

  struct Known {
    int64_t iteration = 0;
    int64_t gradient_bytes = 0, sent_bytes = 0;
    std::map<size_t, Memory>
        memories{};  // by parameter, which buckets may exchange; by bucket where that is the matrix
  };
  PowerSgdOptions options_;
  Known now_;
  Known before_;  // the step: the same tensors, since a step makes new ones and never writes into those of before
};

// Every matrix of a bucket by itself (a tensor of more dimensions counts as its first one by all others), or not at
// all.
CommHook power_sgd_hook(std::shared_ptr<PowerSgd> state);
// A whole bucket as one square matrix: fewer and larger products, and coarser. Not for ranks that may die: what it
// remembers belongs to buckets, which are arranged anew when ranks change.
CommHook batched_power_sgd_hook(std::shared_ptr<PowerSgd> state);

}  // namespace chorale::parallel
