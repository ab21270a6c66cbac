#include "chorale/sharding/decision.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>

#include "chorale/base/error.h"
#include "chorale/op/prepare.h"
#include "chorale/op/shard_ways.h"
#include "chorale/sharding/redistribute.h"
#include "chorale/sharding/sharded.h"

namespace chorale::sharding {
namespace {

using op::OpDef;
using op::Part;
using op::ShardCall;

// A way to split a call (op/shard_ways.h), strided parts included.
struct Way {
  Placements in, out;

  friend bool operator==(const Way&, const Way&) = default;
};

constexpr int64_t kMostPieces = std::numeric_limits<int16_t>::max();  // that a Placement has room for
constexpr double kNever = std::numeric_limits<double>::infinity();

// A view that takes a dimension apart, or puts several together, keeps a split of one further in: its parts are then
// strided in the dimension that is whole (Placement::strided_shard). The rule beside the row of view: [6, 4] as [24],
// split along its second dimension of 4, is 24 in 6 pieces. Parts of unequal length are cut at the same places only if
// nothing stands behind the dimension.
void add_strided_views(const ShardCall& call, std::vector<Way>& ways) {
  const Shape &from = call.in[0].sizes(), &to = call.out[0];
  if (count_elems(from) == 0) return;
  size_t i = 0, j = 0;
  const auto add = [&](const Placement& in, const Placement& out) { ways.push_back({{in}, {out}}); };
  while (i < from.size() && j < to.size()) {
    const size_t first_i = i, first_j = j;
    int64_t left = from[i++], right = to[j++];
    while (left != right) {
      if (left < right) {
        left *= from[i++];
      } else {
        right *= to[j++];
      }
    }
    const auto split = [&](const Shape& many, size_t begin, size_t end, auto&& put) {
      int64_t pieces = many[begin];
      for (size_t d = begin + 1; d < end; ++d) {
        const bool cut_alike = many[d] % call.shards == 0 || d + 1 == end;
        if (pieces > 1 && pieces <= kMostPieces && cut_alike && many[d] > 1) put(static_cast<int64_t>(d), pieces);
        pieces *= many[d];
      }
    };
    if (j - first_j == 1 && i - first_i > 1) {
      split(from, first_i, i, [&](int64_t d, int64_t pieces) {
        add(Placement::shard(d), Placement::strided_shard(static_cast<int64_t>(first_j), pieces));
      });
    } else if (i - first_i == 1 && j - first_j > 1) {
      split(to, first_j, j, [&](int64_t d, int64_t pieces) {
        add(Placement::strided_shard(static_cast<int64_t>(first_i), pieces), Placement::shard(d));
      });
    }
  }
}

// Where some operand is strided: the same ways with strided parts, where it makes no difference to the op in which
// order elements of the dimension stand.
void add_strided(const ShardCall& call, int64_t pieces, std::vector<Way>& ways) {
  // Attributes of a part that are more than its sizes depend on where it stands.
  const std::string_view name = call.op.name;
  const bool sizes_only = name == "expand" || name == "view" || name == "full";
  if ((call.op.shard.local && !sizes_only) || call.op.shard.stretch >= 0) return;
  const size_t count = ways.size();
  for (size_t w = 0; w < count; ++w) {
    Way way = ways[w];
    int64_t size = -1;
    bool same = true, any = false;
    const auto turn = [&](Placement& p, const Shape& sizes) {
      if (!p.is_shard()) return;
      const int64_t along = sizes[static_cast<size_t>(p.dim())];
      same = same && (size < 0 || along == size) && !p.is_strided();
      size = along;
      any = true;
      p = Placement::strided_shard(p.dim(), pieces);
    };
    for (size_t i = 0; i < way.in.size(); ++i) {
      if (call.in[i].defined()) turn(way.in[i], call.in[i].sizes());
    }
    for (size_t i = 0; i < way.out.size(); ++i) turn(way.out[i], call.out[i]);
    // Operands of one length have equal parts, also where the pieces are uneven; elements of a view of other sizes
    // stand at the same places where they are even only.
    const bool even = size % pieces == 0 && size / pieces % call.shards == 0;
    if (any && same && (even || name != "view")) ways.push_back(std::move(way));
  }
}

class Chooser {
 public:
  Chooser(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, size_t outputs, std::span<const Tensor> out)
      : op_(op), in_(in), attrs_(attrs), into_(out) {
    for (const Tensor& x : in) find_mesh(x);
    for (const Tensor& y : out) find_mesh(y);
    check_mixing();
    const op::OutSpecs specs = out.empty() ? op::prepare(op, in, attrs, outputs) : op::prepare_into(op, in, attrs, out);
    for (const op::OutSpec& spec : specs) {
      result_.specs.push_back(spec);
      sizes_.push_back(spec.sizes);
    }
  }

  Decision decide() {
    const size_t dims = mesh().dims();
    result_.in.assign(in_.size(), Placements(dims));
    std::vector<Placements> out(sizes_.size(), Placements(dims));
    for (size_t m = 0; m < dims; ++m) {
      const Way way = best_way(m, out);
      for (size_t i = 0; i < in_.size(); ++i) result_.in[i][m] = way.in[i];
      for (size_t i = 0; i < out.size(); ++i) out[i][m] = way.out[i];
    }
    for (size_t i = 0; i < in_.size(); ++i) {
      result_.moves.push_back(in_[i].defined() && !is_stretch(i) && result_.in[i] != now(i));
      if (!in_[i].defined()) result_.in[i].clear();
    }
    for (const Placements& placements : out) result_.out.push_back(layout_of(mesh(), placements));
    result_.mesh = layout_of(mesh(), Placements(dims));
    fit_to_rank(out);
    return std::move(result_);
  }

 private:
  const Mesh& mesh() const { return *mesh_; }
  bool is_stretch(size_t i) const { return op_.shard.stretch == static_cast<int>(i); }

  void find_mesh(const Tensor& x) {
    if (!x.defined() || !x.is_sharded()) return;
    if (!mesh_) mesh_ = &sharded(x).layout->mesh;
    CHORALE_CHECK(sharded(x).layout->mesh == *mesh_, "[", op_.name, "] operands are sharded over different meshes: a ",
                  *mesh_, " and a ", sharded(x).layout->mesh, "; parts do not move between meshes");
  }

  void check_mixing() const {
    const auto check = [&](const Tensor& x, const char* what, size_t i) {
      CHORALE_CHECK(!x.defined() || x.is_sharded() || x.elems() == 1 || replicates_implicitly(), "[", op_.name, "] ",
                    what, " ", i, " is a whole tensor of shape ", x.sizes(), " beside sharded ones over a ", mesh(),
                    ": distribute() it, or say ImplicitReplication where every rank has the same");
    };
    for (size_t i = 0; i < in_.size(); ++i) {
      if (!is_stretch(i)) check(in_[i], "input", i);
    }
    for (size_t i = 0; i < into_.size(); ++i) {
      CHORALE_CHECK(into_[i].is_sharded() || is_number(into_[i]), "[", op_.name, "] result ", i,
                    " of sharded tensors cannot be written into ", "a whole tensor of shape ", into_[i].sizes(),
                    "; write into a sharded one");
    }
  }

  Placements now_of(const Tensor& x) const {
    return x.defined() && x.is_sharded() ? sharded(x).layout->placements : Placements(mesh().dims());
  }
  Placements now(size_t i) const { return now_of(in_[i]); }

  // What every rank has: a count of steps, a sum.
  static bool is_number(const Tensor& x) { return !x.is_sharded() && x.elems() == 1; }

  static Placement placement_of(const Tensor& x, size_t m) {
    return x.is_sharded() ? sharded(x).layout->placements[m] : Placement();
  }

  // Bytes of an operand that the ranks of a line along mesh dimension m have together.
  double bytes_of(size_t i, size_t m) const {
    double bytes = static_cast<double>(in_[i].elems()) * static_cast<double>(in_[i].elem_bytes());
    const Placements placements = now(i);
    for (size_t other = 0; other < placements.size(); ++other) {
      if (other != m && placements[other].is_shard()) bytes /= mesh().shape()[other];
    }
    return bytes;
  }

  std::vector<Way> ways(int64_t shards, int64_t pieces) const {
    const ShardCall call{op_, attrs_, in_, sizes_, shards};
    std::vector<Way> all;
    all.push_back({Placements(in_.size()), Placements(sizes_.size())});
    std::vector<Way> split;
    for (const op::ShardWay& way : op::shard_ways(call))
      split.push_back({Placements(way.in.begin(), way.in.end()), Placements(way.out.begin(), way.out.end())});
    if (std::strcmp(op_.name, "view") == 0) add_strided_views(call, split);
    if (pieces > 1) add_strided(call, pieces, split);
    all.insert(all.end(), std::make_move_iterator(split.begin()), std::make_move_iterator(split.end()));
    return all;
  }

  int64_t pieces_along(size_t m) const {
    for (size_t i = 0; i < in_.size(); ++i) {
      const Placement p = in_[i].defined() ? now(i)[m] : Placement();
      if (p.is_strided()) return p.pieces();
    }
    for (const Tensor& y : into_) {
      const Placement p = placement_of(y, m);
      if (p.is_strided()) return p.pieces();
    }
    return 1;
  }

  Way best_way(size_t m, const std::vector<Placements>& out) {
    const int64_t shards = mesh().shape()[m];
    const Way* best = nullptr;
    double least = kNever;
    const std::vector<Way> all = ways(shards, pieces_along(m));
    for (const Way& way : all) {
      if (!fits_others(way, m, out)) continue;
      const double cost = cost_of_way(way, m);
      if (cost < least) {
        least = cost;
        best = &way;
      }
    }
    if (!best) raise_in_place(m);
    result_.cost += least;
    return *best;
  }

  double cost_of_way(const Way& way, size_t m) const {
    const Line line{mesh().shape()[m], mesh().spans_hosts(m)};
    double cost = 0;
    bool reduces_to_shard = false, keeps_shard = false;
    for (size_t i = 0; i < in_.size(); ++i) {
      if (!in_[i].defined() || is_stretch(i)) continue;
      const Placement from = now(i)[m], to = way.in[i];
      if (from.is_partial() && to.is_shard()) reduces_to_shard = true;
      if (from.is_shard() && from == to) keeps_shard = true;
      double one = cost_of(from, to, line, bytes_of(i, m));
      if (from.is_replicate() && to.is_partial() && in_[i].dtype() == DType::kBool) one = kNever;
      // What is written into stays where it is.
      if (from != to && is_written(in_[i])) one = kNever;
      // Along one rank nothing has to move; placements stay as they are all the same.
      if (line.ranks == 1 && from != to) one += 1e-6;
      cost += one;
    }
    for (size_t i = 0; i < into_.size(); ++i) {
      const Placement wanted = placement_of(into_[i], m);
      if (is_number(into_[i]) && way.out[i].is_partial()) {  // reduced where the call has been made
        cost += cost_of(way.out[i], wanted, line, static_cast<double>(into_[i].elem_bytes()));
        continue;
      }
      if (wanted != way.out[i]) return kNever;
      if (wanted.is_shard()) keeps_shard = true;
    }
    // Partial values are reduced to copies, unless something else is split in the same way: what nobody asked for is
    // not split.
    return reduces_to_shard && !keeps_shard ? kNever : cost;
  }

  bool is_written(const Tensor& x) const {
    return std::any_of(into_.begin(), into_.end(), [&](const Tensor& y) { return y.is(x); });
  }

  // Where two dimensions of the mesh split one dimension of a tensor, the rule must allow so many parts; and partial
  // values of a result are of one kind.
  bool fits_others(const Way& way, size_t m, const std::vector<Placements>& out) const {
    int64_t parts = mesh().shape()[m];
    bool nested = false;
    const auto meet = [&](const Placement& p, const Placements& before) {
      if (!p.is_shard()) return;
      for (size_t other = 0; other < m; ++other) {
        if (!before[other].is_shard() || before[other].dim() != p.dim()) continue;
        nested = true;
        parts = std::max(parts, static_cast<int64_t>(mesh().shape()[m]) * mesh().shape()[other]);
      }
    };
    for (size_t i = 0; i < way.in.size(); ++i) meet(way.in[i], result_.in[i]);
    for (size_t i = 0; i < way.out.size(); ++i) {
      meet(way.out[i], out[i]);
      if (!way.out[i].is_partial()) continue;
      for (size_t other = 0; other < m; ++other) {
        if (!out[i][other].is_partial()) continue;
        const auto adds = [](const Placement& p) {
          return p.partial().power == 1 &&
                 (p.partial().reduce == Reduce::kSum || p.partial().reduce == Reduce::kAverage);
        };
        if (out[i][other] != way.out[i] && !(adds(out[i][other]) && adds(way.out[i]))) return false;
      }
    }
    if (!nested) return true;
    const std::vector<Way> finer = ways(parts, 1);
    return std::find(finer.begin(), finer.end(), way) != finer.end();
  }

  [[noreturn]] void raise_in_place(size_t m) const {
    std::string inputs;
    for (size_t i = 0; i < in_.size(); ++i) {
      if (in_[i].defined()) inputs += concat(inputs.empty() ? "" : ", ", now(i));
    }
    if (into_.empty()) throw InternalError(concat("[", op_.name, "] no way to run it on shards was found: ", inputs));
    throw InvalidArgument(concat("[", op_.name, "] would have to change how the tensor that it writes into is placed, ",
                                 now_of(into_[0]), ", along dimension ", m, " of a ", mesh(), "; its inputs are ",
                                 inputs, ": redistribute() before, or call the form that returns a new tensor"));
  }

  // What this rank runs.
  void fit_to_rank(const std::vector<Placements>& out) {
    result_.attrs = attrs_;
    if (!mesh().is_member()) return;
    std::vector<Part> in_parts, out_parts;
    for (size_t i = 0; i < in_.size(); ++i) {
      in_parts.push_back(in_[i].defined() ? own_part(in_[i].sizes(), {mesh(), result_.in[i]}) : Part{});
    }
    for (size_t i = 0; i < out.size(); ++i) out_parts.push_back(own_part(sizes_[i], {mesh(), out[i]}));
    const ShardCall call{op_, attrs_, in_, sizes_, 1};
    result_.attrs = op::local_attrs(call, in_parts, out_parts);
    result_.stretch = op::stretch_place(call, in_parts, out_parts);
  }

  const OpDef& op_;
  std::span<const Tensor> in_;
  const Attrs& attrs_;
  std::span<const Tensor> into_;
  const Mesh* mesh_ = nullptr;
  std::vector<Shape> sizes_;
  Decision result_;
};

}  // namespace

Decision decide(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, size_t outputs,
                std::span<const Tensor> out) {
  return Chooser(op, in, attrs, outputs, out).decide();
}

}  // namespace chorale::sharding
