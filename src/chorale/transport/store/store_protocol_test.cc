#include "chorale/transport/store/store_protocol.h"

#include <gtest/gtest.h>

namespace chorale::transport {
namespace {

std::vector<StoreRequest> one_of_each() {
  return {
      {StoreCall::kSet, 0, {"key", "value"}},
      {StoreCall::kGet, -1, {"key"}},
      {StoreCall::kWait, 5, {"a", "b", ""}},
      {StoreCall::kWait, 0, {}},
      {StoreCall::kContains, 0, {"key"}},
      {StoreCall::kAdd, INT64_MIN, {"key"}},
      {StoreCall::kCompareSet, 0, {"k", "", std::string(1000, 'x')}},
      {StoreCall::kRemove, 0, {"key"}},
      {StoreCall::kKeys, 0, {""}},
      {StoreCall::kCount, 0, {}},
      {StoreCall::kWill, 0, {"key", "value"}},
      {StoreCall::kWho, 0, {}},
  };
}

TEST(StoreProtocol, DecodingIsTheInverseOfEncoding) {
  for (const StoreRequest& request : one_of_each()) {
    const auto decoded = decode_request(encode(request));
    ASSERT_TRUE(decoded);
    EXPECT_EQ(decoded->call, request.call);
    EXPECT_EQ(decoded->number, request.number);
    EXPECT_EQ(decoded->words, request.words);
  }
  for (const auto status : {StoreStatus::kOk, StoreStatus::kInvalid, StoreStatus::kTimeout}) {
    const auto decoded = decode_reply(encode(StoreReply{status, 7, {"w", ""}}));
    ASSERT_TRUE(decoded);
    EXPECT_EQ(decoded->status, status);
    EXPECT_EQ(decoded->number, 7);
    EXPECT_EQ(decoded->words, (std::vector<std::string>{"w", ""}));
  }
}

TEST(StoreProtocol, WhatIsCutShortOrTooLongIsNoMessage) {
  for (const StoreRequest& request : one_of_each()) {
    const std::string bytes = encode(request);
    for (size_t size = 0; size < bytes.size(); ++size) EXPECT_FALSE(decode_request(bytes.substr(0, size))) << size;
    EXPECT_FALSE(decode_request(bytes + "x"));
  }
}

TEST(StoreProtocol, ACountOrSizeThatLiesIsNoMessage) {
  const std::string bytes = encode(StoreRequest{StoreCall::kWait, 0, {"a"}});
  for (const size_t at : {size_t{9}, size_t{13}}) {  // the count of words, the size of the first
    std::string lie = bytes;
    lie.replace(at, 4, "\xff\xff\xff\xff");
    EXPECT_FALSE(decode_request(lie)) << at;
  }
}

TEST(StoreProtocol, ARequestWithoutItsWordsOrOfAnUnknownKindIsNoMessage) {
  EXPECT_FALSE(decode_request(encode(StoreRequest{StoreCall::kSet, 0, {"key"}})));
  EXPECT_FALSE(decode_request(encode(StoreRequest{StoreCall::kGet, 0, {}})));
  EXPECT_FALSE(decode_request(encode(StoreRequest{StoreCall::kCount, 0, {"x"}})));
  EXPECT_FALSE(decode_request(encode(StoreRequest{static_cast<StoreCall>(9), 0, {}})));
  EXPECT_FALSE(decode_reply(encode(StoreReply{static_cast<StoreStatus>(3), 0, {}})));
}

}  // namespace
}  // namespace chorale::transport
