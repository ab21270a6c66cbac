#include "chorale/graph/split.h"

#include <gtest/gtest.h>

#include "chorale/base/error.h"

namespace chorale::graph {
namespace {

// A chain of calls, each reading the one before; `charged[i]` are the bytes of parameters of call i.
std::vector<Bucket> chain(const std::vector<std::vector<int64_t>>& charged, double cap_mb,
                          const std::vector<bool>& is_read = {}) {
  std::vector<CallToSplit> calls;
  std::vector<int64_t> bytes;
  for (uint32_t i = 0; i < charged.size(); ++i) {
    CallToSplit call{{i}, {i + 1}, {}};
    for (const int64_t size : charged[i]) {
      call.parameters.push_back(static_cast<uint32_t>(bytes.size()));
      bytes.push_back(size);
    }
    calls.push_back(std::move(call));
  }
  const auto last = static_cast<uint32_t>(charged.size());
  const int64_t cap = bucket_bytes(cap_mb);
  return split_calls(
      calls, bytes, [&](uint32_t v) { return v == last || (v < is_read.size() && is_read[v]); }, cap,
      std::min(kFirstBucketBytes, cap));
}

std::vector<int64_t> bytes_of(const std::vector<Bucket>& buckets) {
  std::vector<int64_t> bytes;
  bytes.reserve(buckets.size());
  for (const Bucket& bucket : buckets) bytes.push_back(bucket.bytes);
  return bytes;
}
using Bytes = std::vector<int64_t>;

// The table of the splitter's worked results.
TEST(Splitter, CutsAsTheTableSays) {
  const std::vector<int64_t> none;
  // Linear and ReLU in turn: 10 -> 5000 -> 5000 -> 5000 -> 5, cap 25 MiB.
  EXPECT_EQ(bytes_of(chain({{220000}, none, {100020000}, none, {100020000}, none, {100020}, none}, 25)),
            (Bytes{220000, 100020000, 100120020}));
  // Four Linear 1000 -> 1000, cap 3.5 MiB = 3,670,016 bytes.
  EXPECT_EQ(bucket_bytes(3.5), 3670016);
  EXPECT_EQ(bytes_of(chain({{4004000}, none, {4004000}, none, {4004000}, none, {4004000}, none}, 3.5)),
            (Bytes{4004000, 4004000, 4004000, 4004000}));
  // All of it fits: one piece.
  EXPECT_EQ(bytes_of(chain({{220}, none, {120}, none, {120}, none, {120}, none}, 250)), (Bytes{580}));
  // 512² with bias, 512² bare through a transposed view, 512² with bias, with what comes before them; cap 1 MiB.
  EXPECT_EQ(bytes_of(chain({none, {1050624}, none, {1048576}, none, none, none, {1050624}, none}, 1)),
            (Bytes{1050624, 1048576, 1050624}));
  // The same with the middle weight and the last bias ignored; cap 25 MiB.
  EXPECT_EQ(bytes_of(chain({none, {1050624}, none, none, none, none, none, {1048576}, none}, 25)),
            (Bytes{1050624, 1048576}));
  // conv 46 -> 640, batch norm, conv 640 -> 640 by 1.
  EXPECT_EQ(bytes_of(chain({{1059840}, {2560, 2560}, {1638400}}, 25)), (Bytes{1064960, 1638400}));
  // Two weights of exactly 1 MiB: the first cap is reached with >=.
  EXPECT_EQ(bytes_of(chain({none, {1048576}, {1048576}, none}, 25)), (Bytes{1048576, 1048576}));
  EXPECT_EQ(bytes_of(chain({none, {1048576}, {1048576}, {1048576}, none}, 1)), (Bytes{1048576, 1048576, 1048576}));
  EXPECT_EQ(bytes_of(chain({{2362368}, {2362368}}, 25)), (Bytes{2362368, 2362368}));
  // Four convolutions of 1 MiB and ReLU.
  EXPECT_EQ(bytes_of(chain({{1048576}, none, {1048576}, none, {1048576}, none, {1048576}, none}, 25)),
            (Bytes{3145728, 1048576}));
  EXPECT_EQ(bytes_of(chain({none, {8680}, none, {28680192}}, 25)), (Bytes{8680, 28680192}));
  EXPECT_EQ(bytes_of(chain({{4724736}, none, {2362368}, none}, 25)), (Bytes{4724736, 2362368}));
  EXPECT_EQ(bytes_of(chain({{8008000}, none, {8008000}, none}, 1)), (Bytes{8008000, 8008000}));
  EXPECT_EQ(bytes_of(chain({{768, 37248 * 4 / 4}, none, {299520 - 768 - 37248}}, 25)), (Bytes{299520}));
}

// BERT: the word embedding, which is the decoder's weight, is charged where either is used.
TEST(Splitter, ChargesATiedWeightAtEachUse) {
  const int64_t embedding = int64_t{30522} * 768 * 4, layer = 28351488;
  std::vector<std::vector<int64_t>> charged{{embedding}, {int64_t{512} * 768 * 4}, {int64_t{2} * 768 * 4}, {768 * 8}};
  EXPECT_EQ(embedding + 512 * 768 * 4 + 2 * 768 * 4 + 768 * 8 + 2359296 + 3072, 97711104);
  charged.push_back({2359296 + 3072});  // the first product of the first layer
  charged.push_back({layer - 2359296 - 3072});
  for (int i = 0; i < 11; ++i) {
    charged.push_back({2359296 + 3072});
    charged.push_back({layer - 2359296 - 3072});
  }
  charged.push_back({6144});
  charged.push_back({93885672 - embedding});
  charged.push_back({embedding});
  const std::vector<Bucket> buckets = chain(charged, 25);
  int64_t sum = 0, all = 0;
  for (const Bucket& bucket : buckets) sum += bucket.bytes;
  for (const auto& call : charged) {
    for (const int64_t bytes : call) all += bytes;
  }
  EXPECT_EQ(sum, all);
  EXPECT_GT(sum, embedding * 2);
}

TEST(Splitter, GoesOnFillingABucketThatNothingReads) {
  // The last two calls only write in place: the piece would return nothing.
  std::vector<CallToSplit> calls{{{0}, {1}, {0}}, {{1}, {2}, {1}}, {{2}, {3}, {2}}};
  const std::vector<int64_t> bytes{2 << 20, 2 << 20, 2 << 20};
  const std::vector<Bucket> buckets = split_calls(
      calls, bytes, [](uint32_t v) { return v == 2; }, 25 << 20);
  ASSERT_EQ(buckets.size(), 2u);
  EXPECT_EQ(buckets[1].extended, 1);
  EXPECT_EQ(buckets[1].bytes, 4 << 20);
  EXPECT_EQ(buckets[1].begin, 1u);
}

// Calls of a checkpointed part are one call to the splitter, whatever they are charged with.
TEST(Splitter, NeverCutsARegion) {
  std::vector<CallToSplit> calls{{{0}, {1}, {0}, 1}, {{1}, {2}, {1}, 1}, {{2}, {3}, {}},
                                 {{3}, {4}, {2}, 2}, {{4}, {5}, {3}, 2}, {{5}, {6}, {}}};
  const std::vector<int64_t> bytes{2 << 20, 2 << 20, 2 << 20, 2 << 20};
  const auto split = [&] {
    return split_calls(
        calls, bytes, [](uint32_t v) { return v == 6; }, 1 << 20);
  };
  EXPECT_EQ(bytes_of(split()), (Bytes{4 << 20, 4 << 20}));
  EXPECT_EQ(split()[1].begin, 3u);
  for (CallToSplit& call : calls) call.region = 0;
  EXPECT_EQ(split().size(), 4u);
}

TEST(Splitter, RefusesAFirstCapAboveTheCap) {
  EXPECT_THROW(split_calls(
                   {}, {}, [](uint32_t) { return false; }, 1000, 2000),
               InvalidArgument);
}

TEST(ActiveDdp, IsTheOuterOneAgainWhenAnInnerOneEnds) {
  ActiveDdp outer, inner;
  EXPECT_EQ(active_ddp(), nullptr);
  {
    const ActiveDdpScope one(outer);
    EXPECT_EQ(active_ddp(), &outer);
    {
      const ActiveDdpScope two(inner);
      EXPECT_EQ(active_ddp(), &inner);
    }
    EXPECT_EQ(active_ddp(), &outer);
  }
  EXPECT_EQ(active_ddp(), nullptr);
}

}  // namespace
}  // namespace chorale::graph
