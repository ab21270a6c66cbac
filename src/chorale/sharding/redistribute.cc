#include "chorale/sharding/redistribute.h"

#include <cmath>
#include <limits>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/comm/mesh_places.h"
#include "chorale/op/collective.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/index.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/shape.h"
#include "chorale/op/view.h"
#include "chorale/sharding/costs.h"
#include "chorale/sharding/sharded_watch.h"

namespace chorale::sharding {
namespace {

using op::Chunk;
using op::chunk_of;

// The mesh dimensions before `mesh_dim` that split dimension `dim`, and how.
std::vector<std::pair<size_t, Placement>> cuts_before(const Placements& placements, int64_t dim, size_t mesh_dim) {
  std::vector<std::pair<size_t, Placement>> cuts;
  for (size_t m = 0; m < mesh_dim; ++m) {
    if (placements[m].is_shard() && placements[m].dim() == dim) cuts.emplace_back(m, placements[m]);
  }
  return cuts;
}

// Which elements of a stretch of `length` the ranks have, one rank behind the other, and how many each.
struct Strided {
  std::vector<std::vector<int64_t>> of_rank;

  Strided(int64_t length, int64_t pieces, int64_t ranks) : of_rank(static_cast<size_t>(ranks)) {
    for (int64_t r = 0; r < ranks; ++r) {
      for (int64_t piece = 0; piece < pieces; ++piece) {
        const Chunk outer = chunk_of(length, pieces, piece), inner = chunk_of(outer.size, ranks, r);
        for (int64_t i = 0; i < inner.size; ++i)
          of_rank[static_cast<size_t>(r)].push_back(outer.first + inner.first + i);
      }
    }
  }
};

Tensor list(const std::vector<int64_t>& values, Device device) {
  const auto count = static_cast<int64_t>(values.size());
  if (device.type == DeviceType::kNull) return Tensor::empty({count}, DType::kI64, device);
  return chorale::to(watch_constant(Tensor::from(values, {count})), device);
}

class Mover {
 public:
  Mover(Tensor local, const Shape& whole, const Mesh& mesh, const Placements& from)
      : x_(std::move(local)), whole_(whole), mesh_(mesh), now_(from) {}

  void move(const Step& step, bool async) {
    m_ = step.mesh_dim;
    ranks_ = mesh_.shape()[m_];
    if (ranks_ > 1) change(step.from, step.to, async);
    now_[m_] = step.to;
  }
  const Tensor& result() const { return x_; }

 private:
  Tensor group() const { return group_tensor(mesh_.shared_group(m_)); }
  // The length of what the ranks of this line have together of a dimension.
  int64_t length(int64_t dim) const {
    return length_of(runs_of(whole_[static_cast<size_t>(dim)], dim, mesh_, now_, m_, mesh_.coordinates()));
  }
  int64_t own() const { return mesh_.coordinates()[m_]; }

  void change(const Placement& from, const Placement& to, bool async) {
    if (from.is_partial()) {
      reduce(from.partial(), to, async);
    } else if (from.is_shard()) {
      CHORALE_CHECK(!to.is_partial(), "[redistribute] a shard cannot become partial values: ", from, " to ", to);
      if (from.is_strided() || to.is_strided()) {
        gather(from, false);
        if (to.is_shard()) cut(to);
      } else if (to.is_shard()) {
        exchange(from.dim(), to.dim(), async);
      } else {
        gather(from, async);
      }
    } else if (to.is_shard()) {
      cut(to);
    } else if (to.is_partial()) {
      share_out(to.partial());
    }
  }

  void reduce(const op::Partial& kind, const Placement& to, bool async) {
    CHORALE_CHECK(!to.is_partial(), "[redistribute] partial values of one kind cannot become another: P(", kind,
                  ") to ", to);
    const bool norm = kind.power != 1;
    if (norm) x_ = pow(abs(x_), kind.power);
    const bool truth = x_.dtype() == DType::kBool;
    if (truth) x_ = chorale::to(x_, DType::kU8);
    // The sum of truth values is "any" and their product is "all".
    const Reduce how = !truth                                                              ? kind.reduce
                       : kind.reduce == Reduce::kSum || kind.reduce == Reduce::kBitOr      ? Reduce::kMax
                       : kind.reduce == Reduce::kProduct || kind.reduce == Reduce::kBitAnd ? Reduce::kMin
                                                                                           : kind.reduce;
    const bool begin = async && !norm && !truth;
    if (to.is_shard() && !to.is_strided()) {
      x_ = begin ? start_reduce_scatter(x_, group(), to.dim(), how) : reduce_scatter(x_, group(), to.dim(), how);
    } else {
      x_ = begin && !to.is_shard() ? start_all_reduce(x_, group(), how) : all_reduce(x_, group(), how);
      if (to.is_shard()) cut(to);
    }
    if (norm) x_ = pow(x_, 1 / kind.power);
    if (truth) x_ = chorale::to(x_, DType::kBool);
  }

  void gather(const Placement& from, bool async) {
    const int64_t dim = from.dim(), together = length(dim);
    if (!from.is_strided()) {
      x_ = async ? start_all_gather(x_, group(), dim, together) : all_gather(x_, group(), dim, together);
      return;
    }
    // Parts of equal length travel; then every element goes where it belongs.
    const Strided order(together, from.pieces(), ranks_);
    const auto longest = static_cast<int64_t>(order.of_rank[0].size());
    if (x_.size(dim) < longest) {
      Shape rest = x_.sizes();
      rest[static_cast<size_t>(dim)] = longest - x_.size(dim);
      x_ = cat({x_, chorale::zeros(rest, x_.dtype(), x_.device())}, dim);
    }
    x_ = all_gather(x_, group(), dim, longest * ranks_);
    std::vector<int64_t> places(static_cast<size_t>(together));
    for (size_t r = 0; r < order.of_rank.size(); ++r) {
      for (size_t i = 0; i < order.of_rank[r].size(); ++i)
        places[static_cast<size_t>(order.of_rank[r][i])] = static_cast<int64_t>(r) * longest + static_cast<int64_t>(i);
    }
    x_ = index_select(x_, dim, list(places, x_.device()));
  }

  void exchange(int64_t from, int64_t to, bool async) {
    if (from == to) return;
    const int64_t together = length(from);
    x_ = async ? start_all_to_all(x_, group(), to, from, together) : all_to_all(x_, group(), to, from, together);
  }

  void cut(const Placement& to) {
    const int64_t dim = to.dim();
    if (to.is_strided()) {
      const auto places = Strided(x_.size(dim), to.pieces(), ranks_).of_rank[static_cast<size_t>(own())];
      x_ = index_select(x_, dim, list(places, x_.device()));
      return;
    }
    const Chunk chunk = chunk_of(x_.size(dim), ranks_, own());
    x_ = narrow(x_, dim, chunk.first, chunk.size);
  }

  // A copy becomes values that add up to it.
  void share_out(const op::Partial& kind) {
    switch (kind.reduce) {
      case Reduce::kAverage:
      case Reduce::kMin:
      case Reduce::kMax:
        return;
      case Reduce::kSum:
        CHORALE_CHECK(kind.power == 1, "[redistribute] a copy cannot become partial norms");
        if (is_differentiable(x_.dtype())) {
          x_ = div(x_, ranks_);
        } else if (own() != 0) {
          x_ = zeros_like(x_);
        }
        return;
      default:
        throw InvalidArgument(concat("[redistribute] a copy cannot become partial values of kind ", kind));
    }
  }

  Tensor x_;
  const Shape& whole_;
  const Mesh& mesh_;
  Placements now_;
  size_t m_ = 0;
  int64_t ranks_ = 1;
};

}  // namespace

std::vector<Step> plan(const Placements& from, const Placements& to) {
  std::vector<Step> steps;
  Placements now = from;
  const auto go = [&](size_t m, const Placement& target) {
    if (now[m] == target) return;
    steps.push_back({m, now[m], target});
    now[m] = target;
  };
  if (now.size() > 1) {
    for (size_t m = now.size(); m-- > 0;) {
      Placement target = to[m];
      if (target.is_shard() && cuts_before(now, target.dim(), m) != cuts_before(to, target.dim(), m)) target = {};
      go(m, target);
    }
  }
  for (size_t m = 0; m < now.size(); ++m) go(m, to[m]);
  return steps;
}

Tensor move_part(const Tensor& local, const Shape& whole, const Mesh& mesh, const Placements& from,
                 const Placements& to, bool async) {
  if (!mesh.is_member()) return local;
  const std::vector<Step> steps = plan(from, to);
  Mover mover(local, whole, mesh, from);
  return comm::with_places(mesh, [&] {
    for (size_t i = 0; i < steps.size(); ++i) mover.move(steps[i], async && i + 1 == steps.size());
    // Of what is traced nobody could tell whether it is on its way, so the wait is part of the graph.
    const bool begun = async && !steps.empty() && mover.result().is_traced();
    return begun ? wait_for(mover.result()) : mover.result();
  });
}

double cost_of(const Placement& from, const Placement& to, const Line& line, double bytes) {
  const CostModel& model = cost_model();
  constexpr double kImpossible = std::numeric_limits<double>::infinity();
  if (from == to || line.ranks == 1) return 0;
  const double hop = line.spans_hosts ? model.hop_between_hosts : model.hop;
  const double speed = model.bytes_per_us * (line.spans_hosts ? model.share_between_hosts : 1);
  const auto hops = static_cast<double>(line.ranks - 1), n = static_cast<double>(line.ranks);
  const double once = model.start + hops * hop + bytes * hops / n / speed;
  if (from.is_replicate()) {
    if (!to.is_partial()) return 0;
    const Reduce kind = to.partial().reduce;
    const bool can = to.partial().power == 1 &&
                     (kind == Reduce::kSum || kind == Reduce::kAverage || kind == Reduce::kMin || kind == Reduce::kMax);
    return can ? 0 : kImpossible;
  }
  if (to.is_partial()) return kImpossible;
  if (from.is_partial()) {
    if (to.is_shard()) return once;
    return model.start + 2 * hops * hop + 2 * bytes * hops / n / speed;
  }
  return to.is_shard() ? once + 1 : once;
}

}  // namespace chorale::sharding
