#include "chorale/io/tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::io {
namespace {

using testing::HasSubstr;

std::string shard(int32_t magic, int32_t version, int32_t count, std::string_view data) {
  std::vector<int32_t> header(256);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return std::string(reinterpret_cast<const char*>(header.data()), 1024) + std::string(data);
}
std::string error_of(const std::string& file) {
  return message_of([&] { parse_token_shard("it", std::as_bytes(std::span(file))); });
}

TEST(TokenShard, KeepsTokensInTheLayoutOfLlmC) {
  const TemporaryFolder folder;
  const std::vector<uint16_t> tokens = {0, 1, 50256, 65535};
  save_token_shard(folder / "a.bin", tokens);
  EXPECT_EQ(folder.read("a.bin"), shard(20240520, 1, 4, std::string_view("\0\0\1\0\x50\xc4\xff\xff", 8)));
  const TokenShard loaded(folder / "a.bin");
  EXPECT_EQ(std::vector<uint16_t>(loaded.tokens().begin(), loaded.tokens().end()), tokens);
}

TEST(TokenShard, SaysWhyAFileIsRefused) {
  EXPECT_EQ(error_of(shard(20240520, 1, 0, "")), "");
  EXPECT_THAT(error_of("short"), HasSubstr("has 5 bytes; a shard begins with a header of 1024"));
  EXPECT_THAT(error_of(shard(20240521, 1, 0, "")), HasSubstr("should begin with 20240520, not 20240521"));
  EXPECT_THAT(error_of(shard(20240520, 2, 0, "")), HasSubstr("has version 2; only 1 is known"));
  EXPECT_THAT(error_of(shard(20240520, 1, 2, "abc")), HasSubstr("says that it has 2 tokens of 2 bytes, but 3"));
  EXPECT_THAT(error_of(shard(20240520, 1, 1, "abc")), HasSubstr("says that it has 1 tokens"));
  EXPECT_THAT(error_of(shard(20240520, 1, -1, "")), HasSubstr("says that it has -1 tokens"));
}

}  // namespace
}  // namespace chorale::io
