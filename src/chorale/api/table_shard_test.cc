// Sharded = whole, for every row of the op table, every sample and every way that the row's rule allows: the sample is
// split as the way says, the op runs on each part, the results are put together as the way says, and compared with the
// whole. Nothing is communicated. A new row needs no line here.
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "chorale/api/table_test_util.h"
#include "chorale/base/error.h"
#include "chorale/op/copy.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/shape.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

// Values that have nothing to do with anything else.
Tensor noise(const Tensor& like, int seed) {
  if (is_complex(like.dtype())) return to(sample_complex(like.sizes(), seed), like.dtype());
  if (is_floating(like.dtype())) return to(sample(like.sizes(), seed), like.dtype());
  return to(sample_ints(like.sizes(), -9, 9, seed), like.dtype());
}

// Values of which x is made, one tensor per rank, none of them anything like x where that can be avoided.
std::vector<Tensor> partial_values(const Tensor& x, const Partial& partial, int64_t shards) {
  std::vector<Tensor> values;
  const bool extreme = partial.reduce == Reduce::kMax || partial.reduce == Reduce::kMin;
  const bool logic = partial.reduce == Reduce::kBitAnd || partial.reduce == Reduce::kBitOr;
  CHORALE_CHECK(extreme || logic || partial.power == 1, "no values for ", partial);
  Tensor rest = partial.reduce == Reduce::kAverage ? mul(x, shards) : x;
  const Tensor turn = to(sample_ints(x.sizes(), 0, shards, 77), DType::kI64);
  for (int64_t r = 0; r < shards; ++r) {
    const Tensor mine = eq(turn, r);  // whose turn it is to have the value itself
    if (extreme) {
      // Further away, in the direction that does not count.
      const Tensor away = to(abs(noise(x, static_cast<int>(100 + r))), x.dtype());
      values.push_back(where(mine, x, partial.reduce == Reduce::kMax ? sub(x, away) : add(x, away)));
    } else if (logic) {
      const bool neutral = partial.reduce == Reduce::kBitAnd;
      values.push_back(where(mine, x, Tensor::from<bool>({neutral}, {})));
    } else if (partial.reduce == Reduce::kProduct) {
      values.push_back(where(mine, x, to(Tensor::from<double>({1}, {}), x.dtype())));
    } else if (r + 1 < shards) {
      values.push_back(noise(x, static_cast<int>(100 + r)));
      rest = sub(rest, values.back());
    } else {
      values.push_back(rest);
    }
  }
  return values;
}

Tensor combine(const std::vector<Tensor>& values, const Partial& partial) {
  const auto powered = [&](const Tensor& x) { return partial.power == 1 ? x : pow(abs(x), partial.power); };
  Tensor all = powered(values[0]);
  for (size_t r = 1; r < values.size(); ++r) {
    const Tensor& x = values[r];
    switch (partial.reduce) {
      case Reduce::kSum:
      case Reduce::kAverage:
        all = add(all, powered(x));
        break;
      case Reduce::kProduct:
        all = mul(all, x);
        break;
      case Reduce::kMin:
        all = minimum(all, x);
        break;
      case Reduce::kMax:
        all = maximum(all, x);
        break;
      case Reduce::kBitAnd:
        all = logical_and(all, x);
        break;
      case Reduce::kBitOr:
        all = logical_or(all, x);
        break;
      case Reduce::kNone:
      case Reduce::kBitXor:
        ADD_FAILURE() << "no rule makes partial values of kind " << partial;
    }
  }
  if (partial.reduce == Reduce::kAverage) all = div(all, static_cast<int64_t>(values.size()));
  return partial.power == 1 ? all : pow(all, 1 / partial.power);
}

Tensor cut_out(const Tensor& x, const Part& part) {
  Tensor view = x;
  for (size_t d = 0; d < part.sizes.size(); ++d) {
    view = narrow(view, static_cast<int64_t>(d), part.first[d], part.sizes[d]);
  }
  return clone(view);
}

class ShardedTable : public ::testing::TestWithParam<const OpDef*> {
 protected:
  const OpDef& row() const { return *GetParam(); }

  // A sample, its results, and what the rule makes of it.
  struct Case {
    const OpDef& op;
    const Sample& sample;
    std::vector<Tensor> whole;
    std::vector<Shape> sizes;

    Case(const OpDef& row, const Sample& of) : op(row), sample(of), whole(run(row, of.in, of.attrs)) {
      for (const Tensor& y : whole) sizes.push_back(y.sizes());
    }
    ShardCall call(int64_t shards) const { return {op, sample.attrs, sample.in, sizes, shards}; }

    std::vector<Part> parts(std::span<const Placement> placements, bool of_inputs, int64_t shards,
                            int64_t shard) const {
      std::vector<Part> result;
      for (size_t i = 0; i < placements.size(); ++i) {
        const bool absent = of_inputs && !sample.in[i].defined();
        const Shape whole_sizes = absent ? Shape() : of_inputs ? sample.in[i].sizes() : sizes[i];
        result.push_back(part_of(whole_sizes, placements[i], shards, shard));
      }
      return result;
    }

    // The results of every rank.
    std::vector<std::vector<Tensor>> run_parts(const ShardWay& way, int64_t shards) const {
      std::vector<std::vector<Tensor>> partial(sample.in.size());
      for (size_t i = 0; i < sample.in.size(); ++i) {
        if (way.in[i].is_partial()) partial[i] = partial_values(sample.in[i], way.in[i].partial(), shards);
      }
      std::vector<std::vector<Tensor>> results;
      for (int64_t r = 0; r < shards; ++r) {
        const std::vector<Part> in_parts = parts(way.in, true, shards, r), out_parts = parts(way.out, false, shards, r);
        std::vector<Tensor> in;
        for (size_t i = 0; i < sample.in.size(); ++i) {
          if (!sample.in[i].defined()) {
            in.emplace_back();
          } else if (const auto place = stretch_place(call(shards), in_parts, out_parts);
                     static_cast<int>(i) == op.shard.stretch && !place.empty()) {
            in.push_back(cat({sample.in[i], Tensor::from(place, {static_cast<int64_t>(place.size())})}, 0));
          } else if (way.in[i].is_partial()) {
            in.push_back(partial[i][static_cast<size_t>(r)]);
          } else {
            in.push_back(way.in[i].is_shard() ? cut_out(sample.in[i], in_parts[i]) : sample.in[i]);
          }
        }
        results.push_back(run(op, in, local_attrs(call(shards), in_parts, out_parts)));
        for (size_t i = 0; i < out_parts.size(); ++i) {
          EXPECT_EQ(results.back()[i].sizes(), out_parts[i].sizes) << "result " << i << " of shard " << r;
        }
      }
      return results;
    }

    void expect_whole(const ShardWay& way, const std::vector<std::vector<Tensor>>& results) const {
      for (size_t i = 0; i < whole.size(); ++i) {
        std::vector<Tensor> each;
        each.reserve(results.size());
        for (const auto& of_rank : results) each.push_back(of_rank[i]);
        const std::string what = "result " + std::to_string(i);
        EXPECT_EQ(each[0].dtype(), whole[i].dtype()) << what;
        if (way.out[i].is_shard()) {
          expect_close(cat(each, way.out[i].dim()), whole[i], 1e-9, what);
        } else if (way.out[i].is_partial()) {
          expect_close(combine(each, way.out[i].partial()), whole[i], 1e-9, what);
        } else {
          for (const Tensor& y : each) expect_close(y, whole[i], 1e-9, what);
        }
      }
    }
  };
};

TEST_P(ShardedTable, PartsGiveTheWhole) {
  const std::vector<Sample> samples = row().samples ? row().samples() : std::vector<Sample>{};
  for (const Sample& sample : samples) {
    const Case whole(row(), sample);
    for (const int64_t shards : {2, 3}) {
      for (const ShardWay& way : shard_ways(whole.call(shards))) {
        std::ostringstream text;
        text << describe(row(), sample) << " on " << shards << " shards: " << way;
        SCOPED_TRACE(text.str());
        try {
          const auto results = whole.run_parts(way, shards);
          if (!HasFailure()) whole.expect_whole(way, results);
        } catch (const Error& error) {
          ADD_FAILURE() << "a part was refused: " << error.what();
        }
        if (HasFailure()) return;
      }
    }
  }
}

// A part may be empty where a dimension is shorter than there are ranks: its results are then empty or neutral, and
// nothing crashes. Here every split dimension has at least one such part.
TEST_P(ShardedTable, EmptyPartsCountNothing) {
  const std::vector<Sample> samples = row().samples ? row().samples() : std::vector<Sample>{};
  for (const Sample& sample : samples) {
    const Case whole(row(), sample);
    int64_t shards = 2;
    for (const Tensor& x : sample.in) {
      if (x.defined()) shards = std::max(shards, x.elems() + 1);
    }
    shards = std::min<int64_t>(shards, 8);
    for (const ShardWay& way : shard_ways(whole.call(shards))) {
      const bool splits = std::any_of(way.in.begin(), way.in.end(), [](const Placement& p) { return p.is_shard(); }) ||
                          std::any_of(way.out.begin(), way.out.end(), [](const Placement& p) { return p.is_shard(); });
      if (!splits) continue;
      std::ostringstream text;
      text << describe(row(), sample) << " on " << shards << " shards: " << way;
      SCOPED_TRACE(text.str());
      try {
        const auto results = whole.run_parts(way, shards);
        if (!HasFailure()) whole.expect_whole(way, results);
      } catch (const Error& error) {
        ADD_FAILURE() << "a part was refused: " << error.what();
      }
      if (HasFailure()) return;
    }
  }
}

std::string row_name(const ::testing::TestParamInfo<const OpDef*>& info) { return info.param->name; }
INSTANTIATE_TEST_SUITE_P(Ops, ShardedTable, ::testing::ValuesIn(all_ops().begin(), all_ops().end()), row_name);

}  // namespace
}  // namespace chorale::op
