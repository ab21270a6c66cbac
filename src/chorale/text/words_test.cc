#include "chorale/text/words.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "chorale/text/unicode.h"

namespace chorale::text {
namespace {

struct Encoded {
  std::string_view text;
  std::vector<std::string_view> pieces;
  std::vector<int32_t> ids;
};
#include "chorale/text/testdata/bpe.inc"

std::vector<std::string> pieces_of(std::string_view text) {
  std::vector<std::string> pieces;
  for_each_piece(text, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

TEST(Words, AreCutAsTheTokenizersPackageCutsThem) {
  for (const Encoded& row : kTexts) {
    EXPECT_EQ(pieces_of(row.text), std::vector<std::string>(row.pieces.begin(), row.pieces.end())) << row.text;
  }
}

TEST(Words, CountBytesThatAreNotUtf8AsOtherCharacters) {
  EXPECT_EQ(pieces_of("ab\xff\xfe c"), (std::vector<std::string>{"ab", "\xff\xfe", " c"}));
  EXPECT_EQ(pieces_of(" \xc3"), (std::vector<std::string>{" \xc3"}));                      // a character cut off
  EXPECT_EQ(pieces_of("a\xc0\x80"), (std::vector<std::string>{"a", "\xc0\x80"}));          // too long a form of 0
  EXPECT_EQ(pieces_of("a\xed\xa0\x80"), (std::vector<std::string>{"a", "\xed\xa0\x80"}));  // a surrogate
}

TEST(Unicode, KnowsLettersNumbersAndSpaces) {
  EXPECT_EQ(kind_of('a'), CharKind::kLetter);
  EXPECT_EQ(kind_of('7'), CharKind::kNumber);
  EXPECT_EQ(kind_of('_'), CharKind::kOther);
  EXPECT_EQ(kind_of('\n'), CharKind::kSpace);
  EXPECT_EQ(kind_of(0x1c), CharKind::kOther);
  EXPECT_EQ(kind_of(0xaa), CharKind::kLetter);
  EXPECT_EQ(kind_of(0xb2), CharKind::kNumber);
  EXPECT_EQ(kind_of(0xa0), CharKind::kSpace);
  EXPECT_EQ(kind_of(0x3042), CharKind::kLetter);
  EXPECT_EQ(kind_of(0x0663), CharKind::kNumber);
  EXPECT_EQ(kind_of(0x3000), CharKind::kSpace);
  EXPECT_EQ(kind_of(0x1f642), CharKind::kOther);
  EXPECT_EQ(kind_of(0x20000), CharKind::kLetter);
  EXPECT_EQ(kind_of(0x10ffff), CharKind::kOther);
}

TEST(Unicode, ReadsBackEveryCodePointItWrites) {
  for (uint32_t code = 0; code <= 0x10ffff; ++code) {
    if (code == 0xd800) code = 0xe000;
    std::string text;
    append_utf8(text, code);
    const Char c = char_at(text, 0);
    ASSERT_TRUE(c.valid && c.code == code && c.bytes == text.size()) << code;
  }
}

}  // namespace
}  // namespace chorale::text
