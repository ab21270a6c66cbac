#include "chorale/base/crc32c.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "chorale/base/crc32c_lanes.h"

namespace chorale {
namespace {

uint32_t crc_of(std::string_view text, uint32_t before = 0) {
  return crc32c(std::as_bytes(std::span(text.data(), text.size())), before);
}

// The values are those of RFC 3720, appendix B.4, and the check value of the catalogue of CRCs.
TEST(Crc32c, GivesTheValuesOfTheStandard) {
  EXPECT_EQ(crc_of(""), 0u);
  EXPECT_EQ(crc_of("123456789"), 0xe3069283u);
  EXPECT_EQ(crc_of(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc_of(std::string(32, '\xff')), 0x62a8ab43u);
  std::string rising(32, 0);
  for (size_t i = 0; i < rising.size(); ++i) rising[i] = static_cast<char>(i);
  EXPECT_EQ(crc_of(rising), 0x46dd794eu);
}

TEST(Crc32c, GoesOnWhereItStopped) {
  const std::string text = "a text that is cut anywhere, and whose length is no multiple of 8";
  for (size_t cut = 0; cut <= text.size(); ++cut)
    EXPECT_EQ(crc_of(text.substr(cut), crc_of(text.substr(0, cut))), crc_of(text)) << cut;
}

// Long ones are summed in wide vectors or in three lanes at once, against bit after bit.
TEST(Crc32c, LongOnesAreSummedInLanes) {
  std::vector<std::byte> bytes(200'000);
  uint32_t state = 1;
  for (std::byte& byte : bytes) {
    state = state * 1664525 + 1013904223;
    byte = static_cast<std::byte>(state >> 24);
  }
  uint32_t slow = ~0u;
  std::vector<uint32_t> expected{0};  // by length
  for (const std::byte byte : bytes) {
    slow ^= static_cast<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) slow = slow & 1 ? slow >> 1 ^ 0x82f63b78u : slow >> 1;
    expected.push_back(~slow);
  }
  const std::span<const std::byte> all(bytes);
  for (const size_t length : {255u, 256u, 257u, 511u, 512u, 513u, 768u, 1023u, 4095u, 8192u, 12287u, 12288u, 12289u,
                              24576u, 73728u, 73729u, 100'003u, 200'000u}) {
    const size_t cut = std::min<size_t>(length, 777);
    for (const auto crc : {crc32c, crc32c_in_lanes}) {
      EXPECT_EQ(crc(all.first(length), 0), expected[length]) << length;
      EXPECT_EQ(crc(all.subspan(cut, length - cut), expected[cut]), expected[length]) << length;
    }
  }
}

}  // namespace
}  // namespace chorale
