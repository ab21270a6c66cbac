#include "chorale/zero/partition.h"

#include <algorithm>
#include <numeric>

namespace chorale::zero {

std::vector<int> owners_of(std::span<const int64_t> elems, std::vector<int64_t>& totals) {
  std::vector<size_t> order(elems.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return elems[a] > elems[b]; });
  std::vector<int> owners(elems.size());
  for (const size_t i : order) {
    const auto least = std::min_element(totals.begin(), totals.end());
    *least += elems[i];
    owners[i] = static_cast<int>(least - totals.begin());
  }
  return owners;
}

}  // namespace chorale::zero
