// A model of which each rank of a replica has a part (tensor parallel). Its parameters are their parts, ordinary leaves
// that data-parallel training, optimizers and hooks know; while the model runs they stand for sharded tensors.
#pragma once

#include <string>
#include <unordered_map>

#include "chorale/parallel/localized.h"
#include "chorale/tensor/named_tensors.h"
#include "chorale/train/job_ranks.h"

namespace chorale::train {

class SplitModel {
 public:
  // Splits the model, which must outlive it, as its plan says, where ranks share one; leaves any other as it is.
  SplitModel(nn::Module& model, const TrainOptions& options, const JobRanks& ranks);

  bool is_split() const { return !parts_.empty(); }
  // Until it goes the model can be called, whether it is split or not.
  class Shown {
   public:
    explicit Shown(const SplitModel& split) {
      if (split.is_split()) split.parts_.enter(split.model_, scope_);
    }

   private:
    parallel::Substitution scope_;
  };

  // Parameters as clipping by a norm wants them: sharded ones with the gradients that the parts have.
  std::vector<Tensor> parameters() const;
  // Parameters and buffers as wholes, where they are wanted. All ranks call it.
  NamedTensors whole_model(bool wanted) const;
  // What the model saves, as this rank has it: sharded tensors where ranks have parts.
  NamedTensors placed_model(bool with_buffers) const;
  // A state of the optimizer, "state/PARAMETER/NAME", likewise.
  Tensor placed_state(const std::string& name, const Tensor& state) const;
  // Memory for a state whose whole has these sizes: placed, and what the optimizer gets of it.
  struct Room {
    Tensor placed, own;
  };
  Room room_for_state(const std::string& name, const Shape& whole, DType dtype) const;

 private:
  // The parameter whose state this is, as the optimizer knows it; undefined where it is none.
  Tensor parameter_of(const std::string& state) const;

  nn::Module& model_;
  parallel::Localized parts_;
  std::unordered_map<std::string, Tensor> parameters_;  // by name
};

}  // namespace chorale::train
