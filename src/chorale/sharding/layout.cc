#include "chorale/sharding/layout.h"

#include <algorithm>
#include <numeric>
#include <ostream>

#include "chorale/base/error.h"

namespace chorale {

std::ostream& operator<<(std::ostream& out, const Placement& placement) {
  if (placement.is_strided()) return out << "S(" << placement.dim() << " in " << placement.pieces() << ")";
  if (placement.is_shard()) return out << "S(" << placement.dim() << ")";
  return placement.is_partial() ? out << "P(" << placement.partial() << ")" : out << "R";
}

std::ostream& operator<<(std::ostream& out, const Placements& placements) {
  out << "[";
  for (size_t i = 0; i < placements.size(); ++i) out << (i ? ", " : "") << placements[i];
  return out << "]";
}

Placement normalized(const Placement& placement, int64_t dims) {
  if (!placement.is_shard()) return placement;
  const int64_t dim = placement.dim() < 0 ? placement.dim() + dims : placement.dim();
  CHORALE_CHECK(dim >= 0 && dim < dims, "[placement] ", placement, " does not fit a tensor of ", dims, " dimensions");
  return Placement::strided_shard(dim, placement.pieces());
}

namespace sharding {

using op::Chunk;
using op::chunk_of;
using op::Part;

Placements checked(const char* call, const Mesh& mesh, const Placements& placements, int64_t dims) {
  CHORALE_CHECK(placements.size() == mesh.dims(), "[", call, "] a ", mesh, " takes one placement for each of its ",
                mesh.dims(), " dimensions, found ", placements.size(), ": ", placements);
  Placements result;
  op::Partial kind;
  const auto adds = [](const op::Partial& p) {
    return p.power == 1 && (p.reduce == Reduce::kSum || p.reduce == Reduce::kAverage);
  };
  for (const Placement& placement : placements) {
    result.push_back(normalized(placement, dims));
    if (!placement.is_partial()) continue;
    CHORALE_CHECK(kind.none() || kind == placement.partial() || (adds(kind) && adds(placement.partial())), "[", call,
                  "] partial values of different kinds do not mix: ", placements);
    kind = placement.partial();
  }
  return result;
}

int64_t length_of(const Runs& runs) {
  return std::accumulate(runs.begin(), runs.end(), int64_t{0},
                         [](int64_t sum, const Chunk& run) { return sum + run.size; });
}

namespace {
// `count` elements from `first` on, of stretches one behind the other.
void take(const Runs& from, int64_t first, int64_t count, Runs& to) {
  for (const Chunk& run : from) {
    if (count <= 0) return;
    if (first >= run.size) {
      first -= run.size;
      continue;
    }
    const int64_t taken = std::min(run.size - first, count);
    if (!to.empty() && to.back().first + to.back().size == run.first + first) {
      to.back().size += taken;
    } else {
      to.push_back({run.first + first, taken});
    }
    count -= taken;
    first = 0;
  }
}
}  // namespace

Runs runs_of(int64_t size, int64_t dim, const Mesh& mesh, const Placements& placements, size_t until,
             const std::vector<int>& coordinates) {
  Runs runs{{0, size}};
  for (size_t m = 0; m < until; ++m) {
    const Placement& placement = placements[m];
    if (!placement.is_shard() || placement.dim() != dim) continue;
    const int64_t length = length_of(runs);
    Runs part;
    for (int64_t piece = 0; piece < placement.pieces(); ++piece) {
      const Chunk outer = chunk_of(length, placement.pieces(), piece);
      const Chunk inner = chunk_of(outer.size, mesh.shape()[m], coordinates[m]);
      take(runs, outer.first + inner.first, inner.size, part);
    }
    // Where an empty part stands still counts: at the end.
    if (part.empty()) part.push_back({runs.back().first + runs.back().size, 0});
    runs = std::move(part);
  }
  return runs;
}

Part part_of(const Shape& whole, const Layout& layout, const std::vector<int>& coordinates) {
  Part part{whole, Shape(whole.size(), 0)};
  for (size_t d = 0; d < whole.size(); ++d) {
    const Runs runs =
        runs_of(whole[d], static_cast<int64_t>(d), layout.mesh, layout.placements, layout.mesh.dims(), coordinates);
    part.sizes[d] = length_of(runs);
    part.first[d] = runs.front().first;
  }
  return part;
}

Part own_part(const Shape& whole, const Layout& layout) {
  if (layout.mesh.is_member()) return part_of(whole, layout, layout.mesh.coordinates());
  return {whole.empty() ? Shape{} : Shape{0}, whole};
}

Strides whole_strides(const Shape& whole, const Tensor& local) {
  if (local.dims() != static_cast<int64_t>(whole.size())) return contiguous_strides(whole);  // outside the mesh
  // The whole's strides are in the order of the part's, as close together as the whole's sizes allow.
  std::vector<size_t> order(whole.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const int64_t left = local.strides()[a], right = local.strides()[b];
    return left != right ? left > right : false;
  });
  Strides strides(whole.size(), 1);
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(whole[order[i]], 1);
  }
  return strides;
}

}  // namespace sharding
}  // namespace chorale
