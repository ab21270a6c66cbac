#include "chorale/base/crc32c.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

namespace chorale {
namespace {

uint32_t crc_of(std::string_view text, uint32_t before = 0) {
  return crc32c(std::as_bytes(std::span(text.data(), text.size())), before);
}

// From RFC 3720, appendix B.4, and the check value of the catalogue of CRCs.
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

}  // namespace
}  // namespace chorale
