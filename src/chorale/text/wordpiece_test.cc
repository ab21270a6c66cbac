#include "chorale/text/wordpiece.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::text {
namespace {

struct Encoded {
  std::string_view text;
  std::vector<int32_t> ids;
};
#include "chorale/text/testdata/wordpiece.inc"

using testing::HasSubstr;
using testing::ThrowsMessage;
using Ids = std::vector<int32_t>;

TEST(WordPiece, EncodesAsTheTokenizersPackageDoes) {
  const auto check = [](const WordPieceOptions& options, std::span<const Encoded> rows) {
    const WordPiece pieces = WordPiece::parse(kVocab, options);
    for (const Encoded& row : rows) EXPECT_EQ(pieces.encode(row.text), row.ids) << row.text;
  };
  check({}, kUncased);
  check({.lower_case = false}, kCased);
  check({.strip_accents = false}, kLowerWithAccents);
}

TEST(WordPiece, DecodesToWords) {
  const WordPiece pieces = WordPiece::parse("[UNK]\nthe\nbegin\n##ning\n[MASK]\n");
  EXPECT_EQ(pieces.encode("The beginning, x"), (Ids{1, 2, 3, 0, 0}));
  EXPECT_EQ(pieces.decode(Ids{1, 2, 3, 4, 0}), "the beginning [MASK] [UNK]");
  EXPECT_EQ(pieces.special("[MASK]"), 4);
  EXPECT_THROW(pieces.special("[CLS]"), InvalidArgument);
  EXPECT_THROW(pieces.decode(Ids{5}), InvalidArgument);
}

TEST(WordPiece, BytesThatAreNoTextArePassedOver) {
  const WordPiece pieces = WordPiece::parse("[UNK]\nab\n");
  EXPECT_EQ(pieces.encode("a\xff"
                          "b \xe2\x82"),
            (Ids{1}));
}

TEST(WordPiece, IsTheSameThroughFiles) {
  const TemporaryFolder folder;
  const WordPiece before = WordPiece::parse(kVocab, {.lower_case = false});
  before.save(folder.path());
  const WordPiece after = WordPiece::load(folder.path());
  for (const Encoded& row : kCased) EXPECT_EQ(after.encode(row.text), row.ids) << row.text;
}

TEST(WordPiece, FilesThatAreNotUnderstoodAreNamed) {
  const TemporaryFolder folder;
  const auto load = [&] { return WordPiece::load(folder.path()); };
  EXPECT_THAT(load, ThrowsMessage<InvalidArgument>(HasSubstr("vocab.txt")));
  folder.write("vocab.txt", "the\r\n[PAD]\r\n");
  EXPECT_THAT(load, ThrowsMessage<InvalidArgument>(HasSubstr("vocab.txt has no token [UNK]")));
  folder.write("vocab.txt", "[UNK]\r\nThe\r\n");
  EXPECT_EQ(load().encode("the"), Ids{0});
  folder.write("tokenizer_config.json", R"({"do_lower_case": false, "strip_accents": null})");
  EXPECT_EQ(load().encode("The"), Ids{1});
  folder.write("tokenizer_config.json", R"({"do_lower_case": 1})");
  EXPECT_THAT(load, ThrowsMessage<InvalidArgument>(HasSubstr("do_lower_case should be true or false")));
  folder.write("tokenizer_config.json", R"({"tokenize_chinese_chars": false})");
  EXPECT_THAT(load, ThrowsMessage<InvalidArgument>(HasSubstr("tokenize_chinese_chars must be true")));
}

}  // namespace
}  // namespace chorale::text
