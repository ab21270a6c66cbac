// Sharded = whole over real groups, for every row of the op table: its samples are distributed in every way that the
// row's rule allows, and the op runs on sharded tensors, gradients included. A new row needs no line here.
#include <gtest/gtest.h>

#include <cstring>

#include "chorale/api/api.h"
#include "chorale/api/table_test_util.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/sharding/sharded.h"

namespace chorale::op {
namespace {

class ShardedOverGroups : public ::testing::TestWithParam<const OpDef*> {
 protected:
  const OpDef& row() const { return *GetParam(); }
  // A group is no tensor to be split, and as_strided speaks of memory.
  bool takes_tensors() const {
    return !std::strstr(row().inputs, "group") && !std::string_view(row().name).starts_with("as_strided");
  }
};

bool has_sparse(const std::vector<Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& x) { return x.defined() && x.is_sparse(); });
}

// Whether the whole can be made partial values of this kind for a test: shares of a sum or an average, copies.
bool can_make(const Placement& p, const Tensor& x) {
  if (!p.is_partial()) return true;
  const Reduce kind = p.partial().reduce;
  return p.partial().power == 1 && x.dtype() != DType::kBool &&
         (kind == Reduce::kSum || kind == Reduce::kAverage || kind == Reduce::kMax || kind == Reduce::kMin);
}

Tensor placed(const Tensor& x, const Mesh& mesh, const Placement& p) {
  if (p.is_partial() && (p.partial().reduce == Reduce::kMax || p.partial().reduce == Reduce::kMin))
    return from_local(clone(x), mesh, {p});
  return distribute(clone(x), mesh, {p}, std::nullopt);
}

struct RowRun {
  std::vector<Tensor> in, out;
};

// The op, with leaves where a gradient is compared, and backward of numbers that depend on the place.
RowRun run_whole(const OpDef& row, const Sample& sample, bool with_gradient,
                 const std::function<Tensor(size_t, const Tensor&)>& place) {
  RowRun run;
  for (size_t i = 0; i < sample.in.size(); ++i) {
    const Tensor& x = sample.in[i];
    run.in.push_back(x.defined() ? place(i, x) : Tensor());
    if (with_gradient && x.defined() && is_differentiable(x.dtype()) && !sample.constant.has(i))
      set_requires_grad(run.in.back());
  }
  run.out.resize(static_cast<size_t>(row.outputs));
  current().call(row, run.in, sample.attrs, run.out);
  if (!with_gradient) return run;
  std::vector<Tensor> roots, gradients;
  for (size_t i = 0; i < run.out.size(); ++i) {
    const Tensor& y = run.out[i];
    if (!is_differentiable(y.dtype()) || !requires_grad(y)) continue;
    const auto seed = static_cast<int>(60 + i);
    const Tensor dy = is_complex(y.dtype()) ? to(sample_complex(y.sizes(), seed), y.dtype())
                                            : to(op::sample(y.sizes(), seed), y.dtype());
    roots.push_back(y);
    gradients.push_back(y.is_sharded() ? distribute(dy, mesh_of(y), Placements(1), std::nullopt) : dy);
  }
  if (!roots.empty()) backward(roots, gradients);
  return run;
}

void expect_equal(const OpDef& row, const Sample& sample, const RowRun& whole, const ShardWay& way, const Mesh& mesh,
                  bool with_gradient) {
  for (size_t i = 0; i < sample.in.size(); ++i) {
    if (sample.in[i].defined() && !can_make(way.in[i], sample.in[i])) return;
  }
  const std::string what = concat(describe(row, sample), " on ", mesh.size(), " ranks: ", way);
  SCOPED_TRACE(what);
  const RowRun parts = run_whole(row, sample, with_gradient, [&](size_t i, const Tensor& x) {
    return row.shard.stretch == static_cast<int>(i) ? x : placed(x, mesh, way.in[i]);
  });
  for (size_t i = 0; i < whole.out.size(); ++i) {
    ASSERT_TRUE(parts.out[i].is_sharded()) << "result " << i;
    // Where all operands are copies, nothing is split that nobody asked for.
    if (!std::all_of(way.in.begin(), way.in.end(), [](const Placement& p) { return p.is_replicate(); })) {
      EXPECT_EQ(placements_of(parts.out[i])[0], way.out[i]) << "result " << i << ": another way was chosen";
    }
    expect_close(full_tensor(detach(parts.out[i])), detach(whole.out[i]), 1e-9, concat("result ", i));
  }
  if (!with_gradient) return;
  for (size_t i = 0; i < whole.in.size(); ++i) {
    if (!whole.in[i].defined()) continue;
    const Tensor wanted = gradient(whole.in[i]), found = gradient(parts.in[i]);
    ASSERT_EQ(wanted.defined(), found.defined()) << "gradient of input " << i;
    if (!wanted.defined() || wanted.is_sparse()) continue;
    expect_close(found.is_sharded() ? full_tensor(found) : found, wanted, 1e-8, concat("gradient of input ", i));
  }
}

// spec: test_dtensor_op_db
TEST_P(ShardedOverGroups, EqualsTheWhole) {
  // Rows over lists place each tensor of a list by itself (optim/sharded_test.cc).
  if (!row().samples || !takes_tensors() || row().lists) return;
  for (const int ranks : {2, 3, 4}) {
    comm::run_ranks(ranks, [&](comm::Group& group) {
      const Mesh mesh(group, {ranks});
      for (const Sample& sample : row().samples()) {
        if (sample.in.empty() || has_sparse(sample.in)) continue;
        // Only a stretch: nothing that could be sharded goes in.
        if (row().shard.stretch == 0 && sample.in.size() == 1) continue;
        const bool with_gradient = sample.grad && row().grad != not_differentiable;
        const RowRun whole = run_whole(row(), sample, with_gradient, [](size_t, const Tensor& x) { return clone(x); });
        if (has_sparse(whole.out)) continue;
        std::vector<Shape> sizes;
        for (const Tensor& y : whole.out) sizes.push_back(y.sizes());
        std::vector<ShardWay> ways;
        if (!row().dynamic) ways = shard_ways({row(), sample.attrs, sample.in, sizes, ranks});
        ways.push_back({std::vector<Placement>(sample.in.size()), std::vector<Placement>(sizes.size())});
        for (const ShardWay& way : ways) {
          expect_equal(row(), sample, whole, way, mesh, with_gradient);
          if (HasFailure()) return;
        }
      }
    });
    if (HasFailure()) return;
  }
}

std::string name_of_row(const ::testing::TestParamInfo<const OpDef*>& info) { return info.param->name; }
INSTANTIATE_TEST_SUITE_P(Ops, ShardedOverGroups, ::testing::ValuesIn(all_ops().begin(), all_ops().end()), name_of_row);

}  // namespace
}  // namespace chorale::op
