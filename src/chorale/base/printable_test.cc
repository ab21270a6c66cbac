#include "chorale/base/printable.h"

#include <gtest/gtest.h>

namespace chorale {
namespace {

TEST(Printable, TextStaysAndOtherBytesAreEscaped) {
  EXPECT_EQ(printable("näme ☃ 𝄞"), "näme ☃ 𝄞");
  EXPECT_EQ(printable("a\xff"
                      "b\n"),
            "a\\xffb\\x0a");
}

TEST(Printable, Utf8IsStrict) {
  for (const char* text :
       {"", "a", "\xc2\x80", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"})
    EXPECT_TRUE(is_utf8(text)) << printable(text);
  for (const char* text : {"\x80", "\xc0\x80", "\xc1\xbf", "\xc3", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xe2\x98",
                           "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff"})
    EXPECT_FALSE(is_utf8(text)) << printable(text);
}

}  // namespace
}  // namespace chorale
