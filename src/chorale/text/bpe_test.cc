#include "chorale/text/bpe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/base/philox.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"
#include "chorale/text/bytes.h"

namespace chorale::text {
namespace {

struct Encoded {
  std::string_view text;
  std::vector<std::string_view> pieces;
  std::vector<int32_t> ids;
};
#include "chorale/text/testdata/bpe.inc"

using testing::HasSubstr;
using Ids = std::vector<int32_t>;

// A vocabulary of the 256 bytes and what follows, as JSON: {…, "extra": 256}.
std::string vocab_with(const std::vector<std::string>& extra) {
  std::string text = "{";
  for (int i = 0; i < 256; ++i) {
    const std::string key = printable(std::string(1, static_cast<char>(i)));
    text += (i ? ", \"" : "\"") + (key == "\"" || key == "\\" ? "\\" + key : key) + "\": " + std::to_string(i);
  }
  for (size_t i = 0; i < extra.size(); ++i) text += ", \"" + extra[i] + "\": " + std::to_string(256 + i);
  return text + "}";
}
std::string error_of(std::string_view vocab, std::string_view merges) {
  return message_of([&] { Bpe::parse(vocab, merges); });
}

TEST(Bpe, LearnsTheMergesThatTheTokenizersPackageLearns) {
  const TemporaryFolder folder;
  const Bpe bpe = Bpe::train(kCorpus, {.vocab_size = 420});
  EXPECT_EQ(bpe.size(), kVocabSize);
  bpe.save(folder.path());
  EXPECT_EQ(folder.read("merges.txt"), "#version: 0.2\n" + std::string(kMerges));
}

TEST(Bpe, EncodesAsTheTokenizersPackageDoes) {
  const Bpe bpe = Bpe::train(kCorpus, {.vocab_size = 420});
  for (const Encoded& row : kTexts) {
    EXPECT_EQ(bpe.encode(row.text), row.ids) << row.text;
    EXPECT_EQ(bpe.decode(row.ids), row.text);
  }
}

TEST(Bpe, IsTheSameThroughFiles) {
  const TemporaryFolder folder;
  const Bpe bpe = Bpe::train(kCorpus, {.vocab_size = 400, .specials = {"<|endoftext|>", "<|Ġ|>"}});
  bpe.save(folder.path() / "new" / "tokenizer");
  const Bpe loaded = Bpe::load(folder.path() / "new" / "tokenizer");
  ASSERT_EQ(loaded.size(), bpe.size());
  for (int32_t id = 0; id < bpe.size(); ++id) EXPECT_EQ(loaded.token(id), bpe.token(id));
  EXPECT_EQ(loaded.encode(kCorpus), bpe.encode(kCorpus));
  EXPECT_EQ(loaded.special("<|endoftext|>"), bpe.size() - 2);
  EXPECT_EQ(loaded.special("<|Ġ|>"), bpe.size() - 1);
  EXPECT_THROW(loaded.special("<|endoftexts|>"), InvalidArgument);
}

TEST(Bpe, HasGpt2sTokensForBytes) {
  const Bpe bpe = Bpe::train("", {.vocab_size = 300});
  EXPECT_EQ(bpe.size(), 256);
  EXPECT_EQ(bpe.encode("!~"), (Ids{0, 93}));
  EXPECT_EQ(bpe.encode("\xa1\xff"), (Ids{94, 187}));  // invalid as UTF-8, and yet encoded
  EXPECT_EQ(bpe.encode(std::string_view("\0\n \x7f\xad", 5)), (Ids{188, 198, 220, 221, 255}));
}

TEST(Bpe, GivesAnyBytesBack) {
  const Bpe bpe = Bpe::train(kCorpus, {.vocab_size = 420});
  for (uint64_t seed = 0; seed < 200; ++seed) {
    std::string text(seed * 3, '\0');
    // Half of them of few different bytes, so that merges happen.
    const uint32_t range = seed % 2 ? 256 : 4;
    for (size_t i = 0; i < text.size(); ++i) {
      const uint32_t word = base::random_word({seed, 0}, i) % range;
      text[i] = range == 4 ? "the "[word] : static_cast<char>(word);
    }
    ASSERT_EQ(bpe.decode(bpe.encode(text)), text);
  }
}

TEST(Bpe, TakesLongWordsInItsStride) {
  const Bpe bpe = Bpe::train(std::string(64, 'a') + " " + std::string(64, 'a'), {.vocab_size = 262});
  EXPECT_EQ(bpe.token(bpe.size() - 1), std::string(64, 'a'));
  const Ids ids = bpe.encode(std::string(1'000'000, 'a'));  // quadratic time would take an hour
  EXPECT_EQ(ids.size(), 1'000'000u / 64);
}

TEST(Bpe, NeverFindsSpecialsInATextAndDecodesThemByName) {
  const Bpe bpe = Bpe::train(kCorpus, {.vocab_size = 400, .specials = {"<|endoftext|>"}});
  const int32_t end = bpe.special("<|endoftext|>");
  EXPECT_THAT(bpe.encode("a<|endoftext|>b"), testing::Not(testing::Contains(end)));
  Ids ids = bpe.encode("a");
  ids.push_back(end);
  EXPECT_EQ(bpe.decode(ids), "a<|endoftext|>");
  EXPECT_THROW(bpe.decode(Ids{400}), InvalidArgument);
  EXPECT_THROW(bpe.decode(Ids{-1}), InvalidArgument);
}

TEST(Bpe, RefusesAVocabularyThatCannotBe) {
  EXPECT_THROW(Bpe::train("a", {.vocab_size = 255}), InvalidArgument);
  EXPECT_THROW(Bpe::train("a", {.vocab_size = 256, .specials = {"x|"}}), InvalidArgument);
  EXPECT_THROW(Bpe::train("a", {.vocab_size = 300, .specials = {"a"}}), InvalidArgument);
  EXPECT_THROW(Bpe::train("a", {.vocab_size = 300, .specials = {"Ġ"}}), InvalidArgument);  // the space, as printed
  EXPECT_THROW(Bpe::train("a", {.vocab_size = 300, .specials = {"x|", "x|"}}), InvalidArgument);
}

TEST(Bpe, KeepsOneTokenForOneStringOfBytes) {
  // "abc" is learnt as ab+c and as a+bc where the first does not apply.
  const std::string good = vocab_with({"ab", "bc", "abc"});
  const Bpe bpe = Bpe::parse(good, "a b\nb c\nab c\na bc\n");
  EXPECT_EQ(bpe.encode("abc"), (Ids{258}));
}

TEST(Bpe, SaysWhyFilesAreRefused) {
  const std::string vocab = vocab_with({"ab", "abc", "<|end|>"});
  EXPECT_EQ(error_of(vocab, "#version: 0.2\na b\nab c"), "");
  EXPECT_EQ(error_of(vocab, "a b\r\nab c\r\n"), "");
  EXPECT_THAT(error_of("[]", ""), HasSubstr("vocab.json should be an object"));
  EXPECT_THAT(error_of("{}", ""), HasSubstr("has no token for the byte 0"));
  EXPECT_THAT(error_of("{\"a\": 1}", ""), HasSubstr("\"a\" has id 1, but ids go from 0 to 0"));
  EXPECT_THAT(error_of("{\"a\": 0, \"b\": 0}", ""), HasSubstr("has the id 0 twice"));
  EXPECT_THAT(error_of("{\"a\": -1}", ""), HasSubstr("should not be negative"));
  EXPECT_THAT(error_of("{\"a\": [0]}", ""), HasSubstr("nested more than 1 levels"));
  EXPECT_THAT(error_of(vocab, "a b\nab"), HasSubstr("line 2: expected two tokens"));
  EXPECT_THAT(error_of(vocab, "a b c"), HasSubstr("line 1: expected two tokens"));
  EXPECT_THAT(error_of(vocab, "a c"), HasSubstr("line 1: a token of 2 bytes is not in vocab.json"));
  EXPECT_THAT(error_of(vocab, "ab c"), HasSubstr("line 1: joins a token that no line before it made"));
  EXPECT_THAT(error_of(vocab, "a b\na b"), HasSubstr("line 2: joins a pair that was joined before"));
  const TemporaryFolder folder;
  EXPECT_THROW(Bpe::load(folder.path()), InvalidArgument);
}

TEST(Bytes, AreTheirOwnTokens) {
  EXPECT_EQ(Bytes::encode("a\xff"), (Ids{97, 255}));
  EXPECT_EQ(Bytes::decode(Ids{97, 255}), "a\xff");
  EXPECT_THROW(Bytes::decode(Ids{256}), InvalidArgument);
}

}  // namespace
}  // namespace chorale::text
