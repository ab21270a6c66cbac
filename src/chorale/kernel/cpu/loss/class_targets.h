// Targets that are classes, checked, and what they weigh.
#pragma once

#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/nn_attrs.h"

namespace chorale::kernel::cpu {

// C is f32 or f64.
template <class C>
class ClassTargets {
 public:
  ClassTargets(const char* op, const Tensor& target, const Tensor& weight, int64_t classes, int64_t ignore_index)
      : target_(contiguous(target, DType::kI64)),
        weight_(weight.defined() ? contiguous(weight, dtype_of<C>) : Tensor()),
        targets_(target_.data<int64_t>()),
        weights_(weight_.defined() ? weight_.data<C>() : nullptr),
        classes_(classes),
        ignore_index_(ignore_index) {
    for (int64_t i = 0; i < count(); ++i) {
      const int64_t c = of(i);
      CHORALE_CHECK(counts(i) ? c >= 0 && c < classes : true, "[", op, "] target ", c, " at place ", i, " of ", count(),
                    " is not one of the ", classes, " classes, nor ignore_index ", ignore_index);
    }
  }

  int64_t count() const { return target_.elems(); }
  int64_t of(int64_t i) const { return targets_[i]; }
  bool counts(int64_t i) const { return of(i) != ignore_index_; }
  // The weight of target i; 0 if it does not count.
  C weight(int64_t i) const { return counts(i) ? class_weight(of(i)) : C(0); }
  C class_weight(int64_t c) const { return weights_ ? weights_[c] : C(1); }
  // Null where all classes weigh 1.
  const C* class_weights() const { return weights_; }
  C total_class_weight() const {
    double total = 0;
    for (int64_t c = 0; c < classes_; ++c) total += static_cast<double>(class_weight(c));
    return static_cast<C>(total);
  }
  // What the sum of losses is divided by.
  double denominator(Reduction reduction) const {
    if (reduction != Reduction::kMean) return 1;
    double total = 0;
    for (int64_t i = 0; i < count(); ++i) total += static_cast<double>(weight(i));
    return total;
  }

 private:
  Tensor target_, weight_;
  const int64_t* targets_;  // data() checks, which a loop over lines should not pay for each time
  const C* weights_;
  int64_t classes_, ignore_index_;
};

}  // namespace chorale::kernel::cpu
