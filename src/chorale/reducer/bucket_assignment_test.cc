#include "chorale/reducer/bucket_assignment.h"

#include <gtest/gtest.h>

#include "chorale/base/error.h"

namespace chorale::reducer {
namespace {

using Buckets = std::vector<std::vector<size_t>>;
using Limits = std::vector<size_t>;

BucketItem f(size_t elems) { return {elems * 4, DType::kF32}; }
BucketItem d(size_t elems) { return {elems * 8, DType::kF64}; }

TEST(BucketAssignment, ABucketClosesWhenItHasReachedItsLimit) {
  const auto result = assign_buckets(std::vector{f(100), f(200), f(100), f(50)}, Limits{400});
  EXPECT_EQ(result.buckets, (Buckets{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(result.limits, (Limits{400, 400, 400, 400}));
}

TEST(BucketAssignment, DtypesAreNotMixedAndBucketsComeByTheirSmallestIndex) {
  const auto result = assign_buckets(std::vector{f(50), d(25), f(50), d(25), f(50), d(25)}, Limits{400});
  EXPECT_EQ(result.buckets, (Buckets{{0, 2}, {1, 3}, {4}, {5}}));
  EXPECT_EQ(result.limits, (Limits{400, 400, 400, 400}));
}

TEST(BucketAssignment, LimitsAdvanceAndTheLastRepeats) {
  const auto result = assign_buckets(std::vector{f(10), f(10), f(10), f(10)}, Limits{40, 80});
  EXPECT_EQ(result.buckets, (Buckets{{0}, {1, 2}, {3}}));
  EXPECT_EQ(result.limits, (Limits{40, 80, 80}));
}

TEST(BucketAssignment, LimitsAdvanceForEachDtypeByItself) {
  const auto result = assign_buckets(std::vector{f(50), d(25), f(50), d(25), f(50), d(25)}, Limits{200, 400});
  EXPECT_EQ(result.buckets, (Buckets{{0}, {1}, {2, 4}, {3, 5}}));
  EXPECT_EQ(result.limits, (Limits{200, 200, 400, 400}));
}

TEST(BucketAssignment, AnOrderOfArrivalIsKept) {
  // Layers of 20, 500 and 200 numbers whose gradients arrive from the last to the first; a cap of 0.001 MB.
  const auto result = assign_buckets(std::vector{f(20), f(500), f(200)}, Limits{1048}, Limits{2, 1, 0});
  EXPECT_EQ(result.buckets, (Buckets{{2, 1}, {0}}));
}

TEST(BucketAssignment, LinearLayersUnderACapOfOneMegabyte) {
  const std::vector items{f(1 << 20), f(1024), f(1 << 20), f(1024), f(1 << 20), f(1024)};
  EXPECT_EQ(assign_buckets(items, Limits{1 << 20}).buckets, (Buckets{{0}, {1, 2}, {3, 4}, {5}}));
  EXPECT_EQ(assign_buckets(items, Limits{1 << 20, 25 << 20}).buckets, (Buckets{{0}, {1, 2, 3, 4, 5}}));
}

TEST(BucketAssignment, ASmallCapGivesEachTensorABucket) {
  const std::vector items{f(1 << 20), f(1024), f(2 << 20), f(2048)};
  EXPECT_EQ(assign_buckets(items, Limits{4096}).buckets, (Buckets{{0}, {1}, {2}, {3}}));
}

TEST(BucketAssignment, ASparseGradientIsNeverJoinedWithOthers) {
  std::vector items{f(10), f(10), f(10)};
  items[1].own_bucket = true;
  EXPECT_EQ(assign_buckets(items, Limits{1000}).buckets, (Buckets{{0, 2}, {1}}));
}

// spec: test_compute_bucket_assignment_by_size_sparse_error_without_logger
TEST(BucketAssignment, SparseTensorsAreRefused) {
  std::vector<Tensor> tensors;
  for (int i = 0; i < 6; ++i) {
    const int64_t elems = i % 2 == 0 ? 50 : 25;
    tensors.push_back(Tensor::sparse_coo(Tensor::from<int64_t>({0}, {1, 1}),
                                         i % 2 == 0 ? Tensor::from<float>({1}, {1}) : Tensor::from<double>({1}, {1}),
                                         {elems}));
  }
  EXPECT_THROW(assign_buckets(tensors, Limits{400}), StateError);
}

}  // namespace
}  // namespace chorale::reducer
