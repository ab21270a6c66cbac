// A bucket of gradients as a communication hook sees it, and what a hook is.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "chorale/comm/group.h"

namespace chorale::reducer {

// Gradients that are reduced together, one after the other in one flat tensor. It is valid during the hook's call and
// until the hook's future is there.
class GradBucket {
 public:
  GradBucket(size_t index, bool is_last, Tensor buffer, std::span<const Tensor> gradients,
             std::span<const size_t> parameters, const comm::Group& group)
      : index_(index),
        is_last_(is_last),
        buffer_(std::move(buffer)),
        gradients_(gradients),
        parameters_(parameters),
        group_(group) {}

  // Buckets are handed to the hook in the order of their indices, the same on all ranks.
  size_t index() const { return index_; }
  // No bucket follows in this backward, so a hook that counts iterations counts here.
  bool is_last() const { return is_last_; }
  // This rank's gradients, contiguous, of one dimension; not divided by anything. It may be overwritten.
  const Tensor& buffer() const { return buffer_; }
  // Another tensor of the same shape and dtype, for a hook that calls a further hook on changed values.
  void set_buffer(const Tensor& buffer);
  // Views of the original buffer in the parameters' shapes, in the order of parameters().
  std::span<const Tensor> gradients() const { return gradients_; }
  // The parameters' indices.
  std::span<const size_t> parameters() const { return parameters_; }
  // The group in which gradients are reduced.
  const comm::Group& group() const { return group_; }

 private:
  size_t index_;
  bool is_last_;
  Tensor buffer_;
  std::span<const Tensor> gradients_;
  std::span<const size_t> parameters_;
  const comm::Group& group_;
};

// What a hook knows from step to step, as a loop sees it that does a step again when ranks die (elastic/elastic.h).
class HookState {
 public:
  virtual ~HookState() = default;
  // A step begins: what is known now can be taken back.
  virtual void begin() {}
  // All ranks apply the step.
  virtual void commit() {}
  // The step is done again: all is known as at begin(). No call of the step is under way any more.
  virtual void abort() {}
  // The ranks change: groups that the hook made out of the wrapper's are over.
  virtual void leave() {}
  // Ranks that began with equal parameters keep them equal: gradients become the same on all. Where they do not, a rank
  // that joins gets all parameters from one other.
  virtual bool keeps_ranks_equal() const { return true; }
  // What every rank knows alike, for one that joins.
  virtual std::string save() const { return {}; }
  virtual void load(const std::string& /*saved*/) {}
};

// Replaces the average of a bucket over ranks: gets this rank's gradients and returns a future of one tensor, shaped
// like the bucket's buffer, that becomes the gradients of all of them; whether to divide by the number of ranks is up
// to it. Every rank's hook makes the same calls of the group in the same order. State belongs into the function object.
struct CommHook {
  std::string name;  // in the log
  std::function<comm::Future(GradBucket&)> run;
  std::shared_ptr<HookState> state{};  // null: nobody can take back what it knows, if it knows anything
};

// A future that is there already.
comm::Future ready_future(const Tensor& value);

}  // namespace chorale::reducer
