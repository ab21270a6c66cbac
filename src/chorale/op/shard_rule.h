// What a row says about shards (docs/dev/ops.md, "Sharding rules"); op/shard_ways.h makes ways to split a call of it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "chorale/kernel/attrs.h"
#include "chorale/op/placement.h"
#include "chorale/tensor/tensor.h"

namespace chorale::op {

struct OpDef;
class ShardWays;

// A call seen as a whole, for the question how it may be split over the ranks of one dimension of a mesh.
struct ShardCall {
  const OpDef& op;
  const Attrs& attrs;
  std::span<const Tensor> in;  // shapes and dtypes are read, no data; an absent operand is undefined
  std::span<const Shape> out;
  int64_t shards = 1;

  int64_t dims(size_t i) const { return in[i].defined() ? in[i].dims() : -1; }
};

// What numbers are drawn for, and the part of it that a rank draws.
struct Drawn {
  Shape whole;
  Part part;
};

// What is said in one of two ways:
// - `labels`: one letter per dimension, operands and results separated by commas, "mk,kn->mn". Splitting a small letter
//   splits every operand and result that has it. A result without the letter is then a partial value, of kind
//   `partial`; an operand without it is whole, or a partial sum too when a "+" stands before it ("...k,nk,+n->...n":
//   the bias is a term of its own, which must not be added once per rank). A capital letter says: this dimension stays
//   whole. "..." stands for any leading dimensions, aligned from the right; an operand of size 1 where others are
//   larger is repeated, and therefore whole.
// - `ways`: a function that adds ways to split this call, by such labels and singly (class ShardWays).
// Partial values may also flow through, where the row is linear or monotone (below).
struct ShardRule {
  const char* labels = nullptr;
  Reduce partial = Reduce::kNone;
  void (*ways)(const ShardCall& call, ShardWays& ways) = nullptr;
  // The input that is a stretch of random numbers (kernel/stretch.h), or -1. A part needs one that says where the part
  // stands in what the numbers are drawn for: that is result 0, unless `drawn` says otherwise.
  int stretch = -1;
  Drawn (*drawn)(const ShardCall& call, std::span<const Part> in, std::span<const Part> out) = nullptr;
  // The attributes with which a rank calls the op on its parts, where they are not those of the whole call (sizes,
  // places). The parts are those of all dimensions of the mesh together.
  Attrs (*local)(const ShardCall& call, std::span<const Part> in, std::span<const Part> out) = nullptr;
  bool replicate = false;
};
// No dimension can be split.
inline constexpr ShardRule kReplicateOnly{.replicate = true};
// Operands and result agree dimension by dimension, after broadcasting.
inline constexpr const char* kElementwiseLabels = "elementwise";
inline constexpr ShardRule kShardElementwise{.labels = kElementwiseLabels};

// The results as a sum of products of inputs (and of things that are no inputs): "x weight + bias". Partial sums and
// averages may flow into one factor of every term at once; the other factors are whole. Bit i of a term is input i.
struct Linear {
  static constexpr int kMaxTerms = 4;
  uint8_t terms[kMaxTerms] = {};
  bool each = false;  // every input is a term, however many there are
};
// One product, with these factors.
constexpr Linear linear_in(std::initializer_list<int> factors) {
  Linear linear;
  for (int i : factors) linear.terms[0] = static_cast<uint8_t>(linear.terms[0] | 1u << i);
  return linear;
}
// Several: linear_terms({{0, 1}, {2}}).
constexpr Linear linear_terms(std::initializer_list<std::initializer_list<int>> terms) {
  Linear linear;
  int at = 0;
  for (const auto& factors : terms) linear.terms[at++] = linear_in(factors).terms[0];
  return linear;
}
inline constexpr Linear kLinearInEach{.each = true};

// The results never fall, or never rise, as one of these inputs grows: partial maxima and minima may flow into one of
// them. Only where it is so for all numbers: the logarithm of a part that is below 0 is none.
struct Monotone {
  uint8_t rises = 0, falls = 0;
};
constexpr Monotone rises_in(std::initializer_list<int> inputs) { return {linear_in(inputs).terms[0], 0}; }
constexpr Monotone falls_in(std::initializer_list<int> inputs) { return {0, linear_in(inputs).terms[0]}; }

}  // namespace chorale::op
