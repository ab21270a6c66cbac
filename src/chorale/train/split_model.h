// A model of which each rank of a replica has a part (tensor parallel). Its parameters are their parts, ordinary leaves
// that data-parallel training, optimizers and hooks know; while the model runs they stand for sharded tensors.
#pragma once

#include <functional>

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
  // Parameters and buffers as wholes. All ranks call it.
  NamedTensors whole_model() const;
  // The states of an optimizer, "state/PARAMETER/NAME", as wholes (all ranks call it), and this rank's part of such.
  NamedTensors whole_states(const NamedTensors& states) const;
  NamedTensors own_states(const NamedTensors& wholes) const;

 private:
  // Calls change(sharded parameter, its part, state) for the states of parameters that are split.
  NamedTensors changed(const NamedTensors& states,
                       const std::function<Tensor(const Tensor&, const Tensor&, const Tensor&)>& change) const;

  nn::Module& model_;
  parallel::Localized parts_;
};

}  // namespace chorale::train
