// Where the elements of a tensor are, over all dimensions of a mesh: what a sharded tensor knows of itself.
#pragma once

#include <iosfwd>
#include <memory>
#include <vector>

#include "chorale/comm/mesh.h"
#include "chorale/op/placement.h"

namespace chorale {

using comm::Mesh;

// What op::Placement says, and what only a sharded tensor needs: dimensions that count from the end, and strided
// shards.
class Placement {
 public:
  constexpr Placement() = default;             // replicated
  constexpr Placement(const op::Placement& p)  // NOLINT(google-explicit-constructor): a way's placements are ours
      : dim_(p.is_shard() ? static_cast<int8_t>(p.dim()) : kNone), partial_(p.partial()) {}
  // A negative dimension counts from the end, once it is known of what (normalized()).
  static constexpr Placement shard(int64_t dim) {
    Placement placement;
    placement.dim_ = static_cast<int8_t>(dim >= 0 ? dim : dim + kFromTheEnd);
    return placement;
  }
  // The dimension is thought of as `pieces` equal stretches, each of which is split over the ranks; a rank has its part
  // of every one, one after the other: q, k and v in one matrix, or rows that another dimension of the mesh cut first.
  static constexpr Placement strided_shard(int64_t dim, int64_t pieces) {
    Placement placement = shard(dim);
    placement.pieces_ = static_cast<int16_t>(pieces);
    return placement;
  }
  static constexpr Placement partial(op::Partial partial) {
    Placement placement;
    placement.partial_ = partial;
    return placement;
  }

  constexpr bool is_shard() const { return dim_ != kNone; }
  constexpr bool is_strided() const { return pieces_ != 1; }  // is_shard() too
  constexpr bool is_partial() const { return !partial_.none(); }
  constexpr bool is_replicate() const { return !is_shard() && !is_partial(); }
  constexpr int64_t dim() const { return dim_ >= 0 ? dim_ : dim_ - kFromTheEnd; }  // of a shard
  constexpr int64_t pieces() const { return pieces_; }                             // of a shard
  constexpr const op::Partial& partial() const { return partial_; }                // of a partial value
  friend constexpr bool operator==(const Placement&, const Placement&) = default;

 private:
  static constexpr int8_t kNone = -1, kFromTheEnd = -8;

  int8_t dim_ = kNone;
  int16_t pieces_ = 1;
  op::Partial partial_;
};
// The placement with its dimension counted from the start. InvalidArgument where a tensor of `dims` has none such.
Placement normalized(const Placement& placement, int64_t dims);

// One for each dimension of a mesh.
using Placements = std::vector<Placement>;

// Words for them: {shard(0), replicate()}.
constexpr Placement shard(int64_t dim) { return Placement::shard(dim); }
constexpr Placement strided_shard(int64_t dim, int64_t pieces) { return Placement::strided_shard(dim, pieces); }
constexpr Placement replicate() { return {}; }
constexpr Placement partial(Reduce reduce = Reduce::kSum) { return Placement::partial(reduce); }

std::ostream& operator<<(std::ostream& out, const Placement& placement);    // R, S(0), S(0 in 3), P(sum), P(norm 2)
std::ostream& operator<<(std::ostream& out, const Placements& placements);  // [S(0), R]

namespace sharding {

struct Layout {
  Mesh mesh;
  Placements placements;
};

// Throws InvalidArgument unless there is one placement for each dimension of the mesh, each fits a tensor of so many
// dimensions, and partial values are of one kind (sums and averages may stand together). Negative dimensions are
// counted from the start afterwards.
Placements checked(const char* call, const Mesh& mesh, const Placements& placements, int64_t dims);

// The elements of one dimension that a rank has, as stretches of the whole one behind the other.
using Runs = std::vector<op::Chunk>;
// The runs of a dimension of this size that is cut by the mesh dimensions below `until`, the first of them first.
Runs runs_of(int64_t size, int64_t dim, const Mesh& mesh, const Placements& placements, size_t until,
             const std::vector<int>& coordinates);
int64_t length_of(const Runs& runs);

// What a rank of the mesh has of a tensor: sizes, and where its first element stands.
op::Part part_of(const Shape& whole, const Layout& layout, const std::vector<int>& coordinates);
// The same of this rank; empty outside the mesh.
op::Part own_part(const Shape& whole, const Layout& layout);

// The strides of a whole tensor of which this is a part: those beyond the stride of a dimension that is split grow with
// it.
Strides whole_strides(const Shape& whole, const Tensor& local);

}  // namespace sharding
}  // namespace chorale
