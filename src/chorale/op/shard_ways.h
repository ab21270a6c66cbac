// The ways in which a call may be split over the ranks of one dimension of a mesh, made from its row's rule. A mesh of
// several dimensions takes one way for each. Pure functions of op, attributes, dtypes and whole shapes: every rank gets
// the same answer, and it can be cached.
#pragma once

#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

#include "chorale/op/op_def.h"

namespace chorale::op {

// If the inputs are placed so, every rank runs the op on its parts, and the results are placed so.
struct ShardWay {
  std::vector<Placement> in, out;

  friend bool operator==(const ShardWay&, const ShardWay&) = default;
};
std::ostream& operator<<(std::ostream& out, const ShardWay& way);  // S(1), S(0) -> P(sum)

// All of them, except that which is always there: every rank has everything. Where a rule does not fit its call, it is
// wrong: InternalError.
std::vector<ShardWay> shard_ways(const ShardCall& call);

// The attributes for the call on these parts.
Attrs local_attrs(const ShardCall& call, std::span<const Part> in, std::span<const Part> out);

// What a stretch of random numbers goes on with on a rank that has these parts (kernel/stretch.h): where they begin and
// how long the whole is, dimension by dimension. Nothing where no numbers are drawn, or for the whole.
std::vector<int64_t> stretch_place(const ShardCall& call, std::span<const Part> in, std::span<const Part> out);

// Which lengths the parts of a split dimension may have.
enum class Parts : uint8_t {
  kAny,
  kNotEmpty,  // none is empty
  kEqual,     // all have the same length
};

// Collects ways; what the function of a rule writes to.
class ShardWays {
 public:
  explicit ShardWays(const ShardCall& call) : call_(call) {}

  // A way for each small letter (ShardRule in op/shard_rule.h).
  void split(std::string_view labels, Partial partial = {}, Parts parts = Parts::kAny);
  // One way; placements of absent operands are ignored.
  void add(std::vector<Placement> in, std::vector<Placement> out);
  // Partial values flow through.
  void pass(const Linear& linear);
  void pass(const Monotone& monotone);

  std::vector<ShardWay> take() { return std::move(ways_); }

 private:
  void pass(const Linear& linear, Reduce kind);

  const ShardCall& call_;
  std::vector<ShardWay> ways_;
};

// True when a dimension of this size can be split so.
bool can_split(int64_t size, int64_t shards, Parts parts);

// ---- letters, for rules that depend on attributes and shapes

// One letter per dimension: abc for 3. None for an absent operand (-1).
std::string letters(int64_t dims, char first = 'a');
// A dimension that must stay whole: its letter as a capital. `dim` may be negative; a scalar has nothing to keep.
std::string keep_whole(std::string labels, int64_t dim);
// All of them.
std::string keep_whole(std::string labels);
// Labels without one dimension, and with another letter for one.
std::string without(std::string labels, int64_t dim);
std::string replaced(std::string labels, int64_t dim, char letter);
// "ab,b->a" from {"ab", "b"} and {"a"}.
std::string join(const std::vector<std::string>& in, const std::vector<std::string>& out);

// ---- attributes of parts

// The sizes of the result stand in the field `sizes`.
template <class A>
Attrs with_result_sizes(const ShardCall& call, std::span<const Part>, std::span<const Part> out) {
  A attrs = call.attrs.get<A>();
  attrs.sizes = out[0].sizes;
  return attrs;
}

}  // namespace chorale::op
