#include "chorale/snapshot/region.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/op/view.h"

namespace chorale::snapshot {

int64_t Region::volume() const {
  int64_t elems = 1;
  for (const int64_t size : sizes) {
    CHORALE_CHECK(!__builtin_mul_overflow(elems, size, &elems), "[checkpoint] a part of sizes ", sizes,
                  " has more elements than can be counted");
  }
  return elems;
}

std::ostream& operator<<(std::ostream& out, const Region& region) {
  return out << region.offsets << "+" << region.sizes;
}

Region whole_of(const Shape& sizes) { return {Shape(sizes.size()), sizes}; }

std::optional<Region> intersection(const Region& a, const Region& b) {
  Region common{a.offsets, a.sizes};
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    const int64_t begin = std::max(a.offsets[d], b.offsets[d]),
                  end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) return {};
    common.offsets[d] = begin;
    common.sizes[d] = end - begin;
  }
  return common;
}

void check_cover(std::string_view what, const Shape& sizes, std::span<const Region> regions) {
  const int64_t all = whole_of(sizes).volume();
  int64_t covered = 0;
  for (size_t i = 0; i < regions.size(); ++i) {
    const Region& region = regions[i];
    CHORALE_CHECK(region.offsets.size() == sizes.size() && region.sizes.size() == sizes.size(), what, ": a part at ",
                  region, " has another number of dimensions than the whole, ", sizes);
    for (size_t d = 0; d < sizes.size(); ++d) {
      CHORALE_CHECK(region.offsets[d] >= 0 && region.sizes[d] >= 0 && region.offsets[d] <= sizes[d] - region.sizes[d],
                    what, ": a part at ", region, " reaches beyond the whole, ", sizes);
    }
    for (size_t j = 0; j < i; ++j) {
      CHORALE_CHECK(!intersection(region, regions[j]), what, ": parts at ", regions[j], " and ", region, " overlap");
    }
    covered += region.volume();
  }
  CHORALE_CHECK(covered == all, what, ": its parts have ", covered, " elements together, and the whole, ", sizes,
                ", has ", all);
}

Tensor part_of(const Tensor& x, const Region& of, const Region& region) {
  Tensor part = x;
  for (size_t d = 0; d < region.sizes.size(); ++d)
    part = narrow(part, static_cast<int64_t>(d), region.offsets[d] - of.offsets[d], region.sizes[d]);
  return part;
}

}  // namespace chorale::snapshot
