// Calls of rows over lists (op::Lists in op/op_def.h).
#pragma once

#include "chorale/op/op_def.h"
#include "chorale/op/prepare.h"

namespace chorale::op {

struct ShardWay;

// The inputs of a call, list by list.
class ListCall {
 public:
  // Throws InvalidArgument where the inputs do not make lists of one length, at least one tensor each.
  ListCall(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs);

  size_t length() const { return length_; }
  const Lists& lists() const { return lists_; }
  std::span<const Tensor> list(size_t i) const { return in_.subspan(lists_.own + i * length_, length_); }
  size_t results() const { return results_; }
  // Calls f(first input, first result, how many) for everything that is written.
  template <class F>
  void for_each_written(F&& f) const {
    size_t result = 0;
    for (size_t i = 0; i < lists_.own + lists_.count; ++i) {
      if (!lists_.written.has(i)) continue;
      const bool own = i < lists_.own;
      const size_t count = own ? 1 : length_;
      f(own ? i : lists_.own + (i - lists_.own) * length_, result, count);
      result += count;
    }
  }
  // Whether `out` are the very tensors that are written, as far as results are new values of inputs.
  bool in_place(std::span<const Tensor> out) const;

 private:
  std::span<const Tensor> in_;
  Lists lists_;
  size_t length_ = 0;
  size_t results_ = 0;
};

// How many results a call has.
size_t result_count(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs);

// Checks a call that writes in place, without saying what comes out. The row's inference is asked with no results: it
// then checks what only such a call needs, layouts that agree.
void prepare_in_place(const OpDef& op, const ListCall& call, std::span<const Tensor> in, const Attrs& attrs,
                      std::span<const Tensor> out);

// What comes out, for a row's inference: what is written looks as before.
void infer_written(const ListCall& call, std::span<const Tensor> in, std::span<OutSpec> out);

// Ways to split tensors of `alike` lists (numbered from 0) along one dimension each: those of one place have one shape.
// Everything else is whole, and `fresh` results are partial values of that kind.
std::vector<ShardWay> split_lists(const ShardCall& call, InputSet alike, Partial fresh = {});

}  // namespace chorale::op
