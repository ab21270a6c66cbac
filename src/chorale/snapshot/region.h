// Parts of a tensor, as boxes: where a part begins in the whole, and how long it is in each dimension.
#pragma once

#include <iosfwd>
#include <optional>
#include <span>
#include <string_view>

#include "chorale/tensor/tensor.h"

namespace chorale::snapshot {

struct Region {
  Shape offsets, sizes;

  // Elements; 1 for the region of a tensor without dimensions.
  int64_t volume() const;
  friend bool operator==(const Region&, const Region&) = default;
};
std::ostream& operator<<(std::ostream& out, const Region& region);  // [4, 0]+[2, 8]

// All of a tensor.
Region whole_of(const Shape& sizes);

// What two regions of one tensor have in common, if anything. An empty region has nothing in common with any other.
std::optional<Region> intersection(const Region& a, const Region& b);

// Throws InvalidArgument, naming `what`, unless the regions lie within a tensor of these sizes, do not overlap and
// cover all of it. Empty ones count for nothing.
void check_cover(std::string_view what, const Shape& sizes, std::span<const Region> regions);

// The part of x, which stands at `of` in a whole, that is `region` of the whole.
Tensor part_of(const Tensor& x, const Region& of, const Region& region);

}  // namespace chorale::snapshot
