#include "chorale/train/corpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::train {
namespace {

TEST(Corpus, FilesFollowEachOtherAndTheEndIsKeptAside) {
  const TemporaryFolder folder;
  const std::string first(60, 'a'), second(40, 'b');
  const Corpus corpus =
      read_corpus({.files = {folder.write("1", first), folder.write("2", second)}, .tokenizer = "bytes", .context = 8});
  EXPECT_EQ(corpus.tokenizer.decode(corpus.tokens) + corpus.tokenizer.decode(corpus.held_out), first + second);
  EXPECT_EQ(corpus.held_out.size(), 9u);  // a window and the token behind it, more than a twentieth here
  EXPECT_EQ(corpus.bytes_per_token, 1);
}
TEST(Corpus, BytePairsAreLearntFromTheText) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 200; ++i) text += "in the beginning ";
  const Corpus corpus =
      read_corpus({.files = {folder.write("t", text)}, .tokenizer = "bpe", .vocab = 300, .context = 8}, {"[MASK]"});
  EXPECT_GT(corpus.bytes_per_token, 4);
  EXPECT_EQ(corpus.tokenizer.special("[MASK]"), corpus.tokenizer.size() - 1);
}
TEST(Corpus, OtherTextHasAnotherFingerprint) {
  const TemporaryFolder folder;
  const auto fingerprint = [&](const std::string& text) {
    return read_corpus({.files = {folder.write("t", text)}, .tokenizer = "bytes", .context = 8}).fingerprint;
  };
  EXPECT_EQ(fingerprint(std::string(50, 'a')), fingerprint(std::string(50, 'a')));
  EXPECT_NE(fingerprint(std::string(50, 'a')), fingerprint(std::string(49, 'a') + "b"));
}
TEST(Corpus, TheTokenizerIsThatOfTheModelToStartFromUnlessAnotherIsNamed) {
  const TemporaryFolder model, nothing;
  model.write("vocab.txt", "[UNK]\nin\nthe\nbegin\n##ning\n[MASK]\n");
  const auto chosen = [](const std::string& named, const std::string& init) {
    TextOptions options{.tokenizer = named};
    choose_tokenizer(options, init);
    return options.tokenizer;
  };
  EXPECT_EQ(chosen("auto", model.path()), model.path());
  EXPECT_EQ(chosen("auto", nothing.path()), "bpe");
  EXPECT_EQ(chosen("auto", ""), "bpe");
  EXPECT_EQ(chosen("bytes", model.path()), "bytes");

  const auto text = nothing.write("t", "In the Beginning in the beginning");
  const Corpus corpus = read_corpus({.files = {text}, .tokenizer = model.path(), .context = 2});
  EXPECT_EQ(corpus.tokens, (std::vector<int32_t>{1, 2, 3, 4, 1}));
  EXPECT_EQ(corpus.held_out, (std::vector<int32_t>{2, 3, 4}));
  EXPECT_THAT([&] { chosen("pbe", ""); },
              testing::ThrowsMessage<InvalidArgument>(testing::HasSubstr("a folder with a tokenizer")));
}
TEST(Corpus, ATextThatIsTooShortSaysWhatToDo) {
  const TemporaryFolder folder;
  try {
    read_corpus({.files = {folder.write("t", "short")}, .tokenizer = "bytes", .context = 8});
    ADD_FAILURE() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("the text has 5 tokens only, too few for windows of 8"));
  }
}

}  // namespace
}  // namespace chorale::train
