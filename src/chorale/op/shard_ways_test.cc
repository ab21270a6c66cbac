// What must be possible with sharded tensors, and what must not (spec/tensor-parallel.md, A5). That the ways give the
// right numbers is the business of api/table_shard_test.cc.
#include "chorale/op/shard_ways.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "chorale/base/error.h"
#include "chorale/kernel/index_attrs.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/kernel/reduce_attrs.h"
#include "chorale/kernel/shape_attrs.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/table.h"

namespace chorale::op {
namespace {

using kernel::DimAttrs;
using kernel::ReduceAttrs;
using kernel::SizesAttrs;
using ::testing::Contains;
using ::testing::IsSupersetOf;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

struct Like {
  Shape sizes;
  DType dtype = DType::kF32;
  bool absent = false;
};
constexpr DType kIndex = DType::kI64;
const Like kAbsent{{}, DType::kF32, true}, kStretch{{2}, kIndex};

struct Call {
  const char* op;
  std::vector<Like> in;
  Attrs attrs{};

  // Asks with shapes alone: nothing is computed.
  std::vector<std::string> ways(int64_t shards = 2) const {
    const OpDef* row = find_op(op);
    CHORALE_CHECK(row, "no op ", op);
    std::vector<Tensor> tensors, out(static_cast<size_t>(row->outputs));
    for (const Like& x : in) tensors.push_back(x.absent ? Tensor() : Tensor::empty(x.sizes, x.dtype, kNull));
    current().call(*row, tensors, attrs, out);
    std::vector<Shape> sizes;
    sizes.reserve(out.size());
    for (const Tensor& y : out) sizes.push_back(y.sizes());
    std::vector<std::string> texts;
    for (const ShardWay& way : shard_ways({*row, attrs, tensors, sizes, shards})) texts.push_back(concat(way));
    return texts;
  }
};

TEST(ShardWays, ChunksAreAsLongAsTheFirstAllows) {
  const auto lengths = [](int64_t size, int64_t shards) {
    std::vector<int64_t> result;
    for (int64_t i = 0; i < shards; ++i) result.push_back(chunk_of(size, shards, i).size);
    return result;
  };
  EXPECT_EQ(lengths(5, 4), (std::vector<int64_t>{2, 2, 1, 0}));
  EXPECT_EQ(lengths(13, 4), (std::vector<int64_t>{4, 4, 4, 1}));
  EXPECT_EQ(lengths(2, 4), (std::vector<int64_t>{1, 1, 0, 0}));
  EXPECT_EQ(lengths(0, 2), (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(chunk_of(5, 4, 3).first, 5) << "an empty shard begins at the end";
  EXPECT_THROW(chunk_of(5, 4, 4), InvalidArgument);
}

TEST(ShardWays, PlacementsPrintAndCompare) {
  EXPECT_EQ(concat(Placement()), "R");
  EXPECT_EQ(concat(Placement::shard(2)), "S(2)");
  EXPECT_EQ(concat(Placement::partial(Reduce::kAverage)), "P(avg)");
  EXPECT_EQ(concat(Placement::partial(Partial::norm(2))), "P(norm 2)");
  EXPECT_EQ(Placement::partial(Partial::norm(1)), Placement::partial(Reduce::kSum));
  EXPECT_EQ(Placement::partial(Partial::norm(INFINITY)), Placement::partial(Reduce::kMax));
  EXPECT_FALSE(Placement::partial(Partial::norm(2)) == Placement::partial(Partial::norm(3)));
}

TEST(ShardWays, ProductsSplitRowsColumnsAndTheSum) {
  EXPECT_THAT((Call{"matmul", {{{4, 6}}, {{6, 5}}}}.ways()),
              UnorderedElementsAre("S(0), R -> S(0)", "R, S(1) -> S(1)", "S(1), S(0) -> P(sum)", "P(sum), R -> P(sum)",
                                   "R, P(sum) -> P(sum)", "P(avg), R -> P(avg)", "R, P(avg) -> P(avg)"))
      << "partial sums flow into one side at a time";
  EXPECT_THAT((Call{"matmul", {{{2, 4, 6}}, {{2, 6, 5}}}}.ways()), Contains("S(0), S(0) -> S(0)"));
  EXPECT_THAT((Call{"matmul", {{{2, 4, 6}}, {{6, 5}}}}.ways()), Contains("S(0), R -> S(0)"));
}

TEST(ShardWays, BiasIsAddedOnce) {
  const auto linear = Call{"linear", {{{8, 6}}, {{4, 6}}, {{4}}}}.ways();
  EXPECT_THAT(linear, IsSupersetOf({"R, S(0), S(0) -> S(1)", "S(0), R, R -> S(0)", "S(1), S(1), P(sum) -> P(sum)",
                                    "P(sum), R, P(sum) -> P(sum)"}));
  EXPECT_THAT(linear, Not(Contains("S(1), S(1), R -> P(sum)")));
  EXPECT_THAT(linear, Not(Contains("P(sum), R, R -> P(sum)")));
  EXPECT_THAT((Call{"linear", {{{8, 6}}, {{4, 6}}, kAbsent}}.ways()), Contains("S(1), S(1), R -> P(sum)"));
  const Attrs attrs(find_op("addmm")->attrs());
  for (const Shape& c : {Shape{5}, Shape{4, 5}, Shape{}, Shape{1, 5}, Shape{4, 1}}) {
    EXPECT_THAT((Call{"addmm", {{c}, {{4, 6}}, {{6, 5}}}, attrs}.ways()), Contains("P(sum), S(1), S(0) -> P(sum)"));
  }
  EXPECT_THAT((Call{"addmm", {{{5}}, {{4, 6}}, {{6, 5}}}, attrs}.ways()),
              IsSupersetOf({"R, S(0), R -> S(0)", "S(0), R, S(1) -> S(1)"}));
  EXPECT_THAT((Call{"addmm", {{{4, 1}}, {{4, 6}}, {{6, 5}}}, attrs}.ways()),
              IsSupersetOf({"S(0), S(0), R -> S(0)", "R, R, S(1) -> S(1)"}));
}

TEST(ShardWays, ViewsKeepTheLeadingFactor) {
  const auto view = [](const Shape& from, const Shape& to, int64_t shards) {
    std::vector<std::string> splits;
    for (const std::string& way : Call{"view", {{from}}, SizesAttrs{to}}.ways(shards)) {
      if (way[0] == 'S') splits.push_back(way);
    }
    return splits;
  };
  EXPECT_THAT(view({4, 3}, {12}, 2), UnorderedElementsAre("S(0) -> S(0)")) << "flatten";
  EXPECT_THAT(view({12}, {4, 3}, 2), UnorderedElementsAre("S(0) -> S(0)")) << "and back";
  EXPECT_THAT(view({12}, {4, 3}, 3), UnorderedElementsAre()) << "chunks of 4 elements hold no whole rows";
  EXPECT_THAT(view({5, 2}, {10}, 2), UnorderedElementsAre()) << "6 and 4 elements are not 5 and 5";
  EXPECT_THAT(view({5, 3}, {5, 3, 1}, 2), UnorderedElementsAre("S(0) -> S(0)", "S(1) -> S(1)"));
  EXPECT_THAT(view({8, 7, 12}, {8, 7, 4, 3}, 2), UnorderedElementsAre("S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)"))
      << "heads out of features";
  EXPECT_THAT(view({8, 7, 4, 3}, {56, 12}, 4), UnorderedElementsAre("S(0) -> S(0)", "S(2) -> S(1)"));
  EXPECT_THAT(view({1, 6}, {6}, 2), UnorderedElementsAre("S(1) -> S(0)"));
  EXPECT_THAT(view({2, 3, 4}, {4, 6}, 2), UnorderedElementsAre("S(0) -> S(0)"));
  EXPECT_THAT(view({0, 3}, {0}, 2), UnorderedElementsAre());
  EXPECT_THAT((Call{"view", {{{4, 3}}}, SizesAttrs{{12}}}.ways()), Contains("P(sum) -> P(sum)"));
}

TEST(ShardWays, DimensionsThatMoveTakeTheirShardsAlong) {
  EXPECT_THAT(
      (Call{"permute", {{{4, 3, 2}}}, kernel::DimsAttrs{{2, 0, 1}}}.ways()),
      UnorderedElementsAre("S(0) -> S(1)", "S(1) -> S(2)", "S(2) -> S(0)", "P(sum) -> P(sum)", "P(avg) -> P(avg)"));
  EXPECT_THAT((Call{"unsqueeze", {{{4, 3}}}, DimAttrs{1}}.ways()), IsSupersetOf({"S(0) -> S(0)", "S(1) -> S(2)"}));
  EXPECT_THAT((Call{"expand", {{{4, 1}}}, SizesAttrs{{2, -1, 6}}}.ways()),
              IsSupersetOf({"R -> S(0)", "S(0) -> S(1)", "R -> S(2)"}));
}

TEST(ShardWays, ReductionsHavePartialValuesOfTheirOwnKind) {
  const auto reduce = [](const char* op, DType dtype = DType::kF32, int64_t size = 4) {
    return Call{op, {{{size, 6}, dtype}}, ReduceAttrs{{0}, false}}.ways();
  };
  EXPECT_THAT(reduce("sum"),
              UnorderedElementsAre("S(1) -> S(0)", "S(0) -> P(sum)", "P(sum) -> P(sum)", "P(avg) -> P(avg)"));
  EXPECT_THAT(reduce("mean"),
              UnorderedElementsAre("S(1) -> S(0)", "S(0) -> P(avg)", "P(sum) -> P(sum)", "P(avg) -> P(avg)"));
  EXPECT_THAT(reduce("mean", DType::kF32, 5), Not(Contains("S(0) -> P(avg)"))) << "3 and 2 elements";
  EXPECT_THAT(reduce("amax"), UnorderedElementsAre("S(1) -> S(0)", "S(0) -> P(max)", "P(max) -> P(max)"));
  EXPECT_THAT(reduce("amin"), UnorderedElementsAre("S(1) -> S(0)", "S(0) -> P(min)", "P(min) -> P(min)"));
  EXPECT_THAT(reduce("amax", DType::kF32, 1), Not(Contains("S(0) -> P(max)"))) << "nothing has no maximum";
  EXPECT_THAT(reduce("prod"), UnorderedElementsAre("S(1) -> S(0)", "S(0) -> P(product)", "P(product) -> P(product)"));
  EXPECT_THAT(reduce("any", DType::kBool), UnorderedElementsAre("S(1) -> S(0)", "S(0) -> P(or)", "P(or) -> P(or)"));
  EXPECT_THAT(reduce("all", DType::kBool), UnorderedElementsAre("S(1) -> S(0)", "S(0) -> P(and)", "P(and) -> P(and)"));
  EXPECT_THAT(reduce("logsumexp"), UnorderedElementsAre("S(1) -> S(0)"));
  EXPECT_THAT((Call{"sum", {{{4, 6}}}, ReduceAttrs{{0}, true}}.ways()), Contains("S(1) -> S(1)"));
  const auto norm = [](double p) { return Call{"norm", {{{4, 6}}}, kernel::NormAttrs{p, {0}, false}}.ways(); };
  EXPECT_THAT(norm(2), UnorderedElementsAre("S(1) -> S(0)", "S(0) -> P(norm 2)"));
  EXPECT_THAT(norm(0), Contains("S(0) -> P(sum)"));
  EXPECT_THAT(norm(INFINITY), Contains("S(0) -> P(max)"));
  for (const char* op : {"var", "std"}) {
    EXPECT_THAT((Call{op, {{{4, 6}}}, kernel::VarAttrs{{0}, 1, false}}.ways()), UnorderedElementsAre("S(1) -> S(0)"));
  }
}

TEST(ShardWays, WhatIsOrderedOrNormalisedStaysWhole) {
  for (const char* op : {"softmax", "log_softmax"}) {
    EXPECT_THAT((Call{op, {{{4, 6}}}, DimAttrs{1}}.ways()), UnorderedElementsAre("S(0) -> S(0)"));
  }
  EXPECT_THAT((Call{"cumsum", {{{4, 6}}}, kernel::ScanAttrs{1, false, false}}.ways()),
              UnorderedElementsAre("S(0) -> S(0)", "P(sum) -> P(sum)", "P(avg) -> P(avg)"));
  EXPECT_THAT((Call{"max", {{{4, 6}}}, kernel::PickAttrs{1, false}}.ways()),
              UnorderedElementsAre("S(0) -> S(0), S(0)"));
  EXPECT_THAT((Call{"argmax", {{{4, 6}}}, kernel::ArgAttrs{0, true, false}}.ways()), UnorderedElementsAre());
}

TEST(ShardWays, LayerNormOverTrailingDimensions) {
  EXPECT_THAT((Call{"layer_norm", {{{4, 6, 8}}, {{8}}, {{8}}}, kernel::LayerNormAttrs{{8}, 1e-5}}.ways()),
              UnorderedElementsAre("S(0), R, R -> S(0), S(0), S(0)", "S(1), R, R -> S(1), S(1), S(1)"));
  EXPECT_THAT((Call{"layer_norm_backward",
                    {{{4, 6, 8}}, {{4, 6, 8}}, {{4, 6, 1}}, {{4, 6, 1}}, {{8}}},
                    kernel::LayerNormBackwardAttrs{{8}, true}}
                   .ways()),
              IsSupersetOf({"S(1), S(1), S(1), S(1), R -> S(1), P(sum), P(sum)"}))
      << "gradients of parameters are partial sums";
}

TEST(ShardWays, EmbeddingsSplitRowsColumnsAndIndices) {
  EXPECT_THAT((Call{"embedding", {{{16, 8}}, {{4, 5}, kIndex}}, kernel::EmbeddingAttrs{}}.ways()),
              UnorderedElementsAre("S(0), R -> P(sum)", "S(1), R -> S(2)", "R, S(0) -> S(0)", "R, S(1) -> S(1)",
                                   "P(sum), R -> P(sum)", "P(avg), R -> P(avg)"));
  EXPECT_THAT((Call{"embedding_backward", {{{4, 5, 8}}, {{4, 5}, kIndex}}, kernel::EmbeddingBackwardAttrs{16}}.ways()),
              IsSupersetOf({"R, R -> S(0)", "S(2), R -> S(1)", "S(0), S(0) -> P(sum)", "P(sum), R -> P(sum)"}));
}

TEST(ShardWays, AttentionSplitsBatchAndHeads) {
  const Like q{{4, 8, 6, 2}};
  kernel::AttentionAttrs attrs;
  EXPECT_THAT((Call{"attention", {q, q, q, kAbsent, kAbsent}, attrs}.ways()),
              UnorderedElementsAre("S(0), S(0), S(0), R, R -> S(0), S(0)", "S(1), S(1), S(1), R, R -> S(1), S(1)"));
  attrs.dropout_p = 0.5;
  EXPECT_THAT((Call{"attention", {q, q, q, {{6, 6}}, kStretch}, attrs}.ways()),
              Contains("S(1), S(1), S(1), R, R -> S(1), S(1)"));
  attrs.grouped = true;
  const Like k{{4, 2, 6, 2}};
  EXPECT_THAT((Call{"attention", {q, k, k, {{4, 8, 6, 6}}, kStretch}, attrs}.ways(2)),
              Contains("S(1), S(1), S(1), S(1), R -> S(1), S(1)"));
  EXPECT_THAT((Call{"attention", {q, k, k, kAbsent, kStretch}, attrs}.ways(4)),
              UnorderedElementsAre("S(0), S(0), S(0), R, R -> S(0), S(0)"))
      << "two heads of keys do not fill four shards";
}

TEST(ShardWays, ConvolutionsSplitSamplesAndChannels) {
  kernel::ConvolutionAttrs attrs{.stride = {1, 1}, .padding = {0, 0}, .dilation = {1, 1}, .result = {}};
  EXPECT_THAT((Call{"convolution", {{{4, 6, 5, 5}}, {{8, 6, 3, 3}}, {{8}}}, attrs}.ways()),
              IsSupersetOf({"S(0), R, R -> S(0)", "R, S(0), S(0) -> S(1)", "S(1), S(1), P(sum) -> P(sum)"}));
  attrs.groups = 2;
  const auto grouped = Call{"convolution", {{{4, 6, 5, 5}}, {{8, 3, 3, 3}}, {{8}}}, attrs}.ways();
  EXPECT_THAT(grouped, IsSupersetOf({"S(0), R, R -> S(0)", "S(1), S(0), S(0) -> S(1)"}));
  EXPECT_THAT(grouped, Not(Contains("R, S(0), S(0) -> S(1)"))) << "a part of the channels is no part of each group";
}

TEST(ShardWays, PartsOfLists) {
  EXPECT_THAT((Call{"cat", {{{4, 6}}, {{2, 6}}}, DimAttrs{0}}.ways()),
              UnorderedElementsAre("S(1), S(1) -> S(1)", "P(sum), P(sum) -> P(sum)", "P(avg), P(avg) -> P(avg)"));
  EXPECT_THAT((Call{"stack", {{{4, 6}}, {{4, 6}}}, DimAttrs{0}}.ways()),
              IsSupersetOf({"S(0), S(0) -> S(1)", "S(1), S(1) -> S(2)", "P(sum), P(sum) -> P(sum)"}));
}

TEST(ShardWays, WhatIsIndexedStaysWhole) {
  EXPECT_THAT((Call{"slice", {{{4, 6}}}, kernel::SliceAttrs{0, 1, 3, 1}}.ways()),
              UnorderedElementsAre("S(1) -> S(1)", "P(sum) -> P(sum)", "P(avg) -> P(avg)"));
  EXPECT_THAT((Call{"slice", {{{4, 6}}}, kernel::SliceAttrs{0, 0, 4, 1}}.ways()), Contains("S(0) -> S(0)"))
      << "the slice is everything";
  EXPECT_THAT(
      (Call{"gather", {{{4, 6}}, {{4, 3}, kIndex}}, DimAttrs{1}}.ways()),
      UnorderedElementsAre("S(0), S(0) -> S(0)", "R, S(1) -> S(1)", "P(sum), R -> P(sum)", "P(avg), R -> P(avg)"));
  EXPECT_THAT((Call{"index_add", {{{4, 6}}, {{3}, kIndex}, {{3, 6}}}, kernel::IndexAddAttrs{0, 1}}.ways()),
              IsSupersetOf({"S(1), R, S(1) -> S(1)", "P(sum), S(0), S(0) -> P(sum)"}));
}

TEST(ShardWays, RandomNumbersKeepTheirPlace) {
  EXPECT_THAT((Call{"dropout", {{{4, 6}}, kStretch}, kernel::DropoutAttrs{0.5}}.ways()),
              UnorderedElementsAre("S(0), R -> S(0)", "S(1), R -> S(1)"))
      << "partial values are reduced first";
  const Attrs attrs = kernel::DropoutAttrs{0.5};
  const std::vector<Tensor> in{Tensor::empty({4, 6}, DType::kF32, kNull), Tensor::empty({2}, DType::kI64, kNull)};
  const std::vector<Shape> out{{4, 6}};
  const ShardCall call{*find_op("dropout"), attrs, in, out, 2};
  const Part whole{{4, 6}, {0, 0}}, stretch{{2}, {0}}, part{{2, 3}, {2, 3}};
  EXPECT_EQ(stretch_place(call, std::vector{part, stretch}, std::vector{part}), (std::vector<int64_t>{2, 4, 3, 6}));
  EXPECT_EQ(stretch_place(call, std::vector{whole, stretch}, std::vector{whole}), (std::vector<int64_t>{}));
}

TEST(ShardWays, CastsKeepWhatSurvivesThem) {
  const auto cast = [](DType from, DType to) {
    std::vector<std::string> passes;
    for (const std::string& way : Call{"to", {{{4}, from}}, CopyAttrs{to}}.ways()) {
      if (way[0] == 'P') passes.push_back(way.substr(0, way.find(' ')));
    }
    return passes;
  };
  EXPECT_THAT(cast(DType::kF32, DType::kBF16), UnorderedElementsAre("P(sum)", "P(avg)", "P(max)", "P(min)"));
  EXPECT_THAT(cast(DType::kF32, DType::kI64), UnorderedElementsAre("P(max)", "P(min)")) << "fractions add up";
  EXPECT_THAT(cast(DType::kI32, DType::kI64), UnorderedElementsAre("P(sum)", "P(max)", "P(min)"));
  EXPECT_THAT(cast(DType::kF32, DType::kBool), UnorderedElementsAre());
}

}  // namespace
}  // namespace chorale::op
