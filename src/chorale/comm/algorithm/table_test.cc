#include "chorale/comm/algorithm/table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

using testing::Contains;
using testing::HasSubstr;

TEST(AlgorithmTable, IsReadFromTextPickedFromBySizeAndShown) {
  const auto table = AlgorithmTable::parse("all_reduce:100=shards,all_reduce:0=leaders,all_reduce:5000=direct");
  EXPECT_EQ(table.between_hosts(CallKind::kAllReduce, 99), Algorithm::kLeaders);
  EXPECT_EQ(table.between_hosts(CallKind::kAllReduce, 100), Algorithm::kShards);
  EXPECT_EQ(table.between_hosts(CallKind::kAllReduce, 1 << 20), Algorithm::kDirect);
  EXPECT_THAT(table.text(), HasSubstr("all_reduce:0=slot,all_reduce:1025=in_place,"
                                      "all_reduce:0=leaders,all_reduce:100=shards,all_reduce:5000=direct,"));
  EXPECT_THAT(table.text(), HasSubstr("reduce_scatter:0=direct,reduce_scatter:32768=shards"));
  EXPECT_EQ(AlgorithmTable::parse("reduce_scatter:9=shards").between_hosts(CallKind::kReduceScatter, 1),
            Algorithm::kShards);
  EXPECT_EQ(AlgorithmTable::parse(AlgorithmTable::parse("").text()).text(), AlgorithmTable::parse("").text());
}

TEST(AlgorithmTable, HasTheWaysOnOneHostToo) {
  const auto built_in = AlgorithmTable::parse("");
  EXPECT_EQ(built_in.most_by_slot(CallKind::kAllReduce), 1024);
  EXPECT_EQ(built_in.most_by_slot(CallKind::kAllGather), 16 << 10);
  EXPECT_EQ(built_in.most_by_slot(CallKind::kBarrier), ~uint64_t{0});
  // Rows of one place leave those of the other alone.
  const auto table = AlgorithmTable::parse("all_reduce:4096=in_place,all_reduce:0=slot,broadcast:0=read");
  EXPECT_EQ(table.most_by_slot(CallKind::kAllReduce), 4095);
  EXPECT_EQ(table.most_by_slot(CallKind::kBroadcast), 0);
  EXPECT_EQ(table.most_by_slot(CallKind::kReduce), 1024);
  EXPECT_EQ(table.between_hosts(CallKind::kAllReduce, 0), Algorithm::kLeaders);
  EXPECT_EQ(AlgorithmTable::parse("all_reduce:0=slot").most_by_slot(CallKind::kAllReduce), ~uint64_t{0});
}

TEST(AlgorithmTable, PrintsALinePerCall) {
  EXPECT_THAT(AlgorithmTable::parse("").lines(),
              Contains("all_reduce: on one host slot, from 1025 bytes on in_place; between hosts leaders, from 32768 "
                       "bytes on shards"));
  EXPECT_THAT(AlgorithmTable::parse("").lines(), Contains("broadcast: on one host slot, from 16385 bytes on read"));
}

TEST(AlgorithmTable, RefusesWhatItCannotRead) {
  for (const char* wrong : {"all_reduce", "all_reduce:=direct", "all_reduce:1x=direct", "all_reduce:1=ring",
                            "broadcast:1=direct", "all_reduce=1:direct", "reduce_scatter:1=leaders", "barrier:1=slot",
                            "all_reduce:1=read", "all_reduce:0=in_place,all_reduce:9=slot"}) {
    EXPECT_THROW(AlgorithmTable::parse(wrong), InvalidArgument) << wrong;
  }
}

}  // namespace
}  // namespace chorale::comm
