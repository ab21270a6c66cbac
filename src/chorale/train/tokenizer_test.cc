#include "chorale/train/tokenizer.h"

#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::train {
namespace {

TEST(Tokenizer, SpecialsOfBytesFollowTheBytes) {
  const Tokenizer tokenizer = Tokenizer::bytes({"[PAD]", "[MASK]"});
  EXPECT_EQ(tokenizer.size(), 258);
  EXPECT_EQ(tokenizer.special("[MASK]"), 257);
  EXPECT_THROW(tokenizer.special("[CLS]"), InvalidArgument);
  EXPECT_EQ(tokenizer.encode("a["), (std::vector<int32_t>{97, 91}));
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{97, 257, 98}), "a[MASK]b");
}
TEST(Tokenizer, WhatIsSavedBesideAModelIsLoaded) {
  const TemporaryFolder folder;
  EXPECT_EQ(Tokenizer::load(folder.path()).size(), 256);  // no vocabulary: bytes
  const Tokenizer tokenizer =
      Tokenizer::bpe(text::Bpe::train("the cat and the dog and the hen", {.vocab_size = 262, .specials = {"[MASK]"}}));
  tokenizer.save(folder.path());
  const Tokenizer loaded = Tokenizer::load(folder.path());
  EXPECT_EQ(loaded.size(), 262);
  EXPECT_EQ(loaded.encode("the end"), tokenizer.encode("the end"));
  EXPECT_EQ(loaded.special("[MASK]"), 261);
}

TEST(Utf8Pieces, ACharacterComesWhenItIsWhole) {
  Utf8Pieces pieces;
  EXPECT_EQ(pieces.add("a\xe2"), "a");
  EXPECT_EQ(pieces.add("\x82"), "");
  EXPECT_EQ(pieces.add("\xac!"), "€!");
  EXPECT_EQ(pieces.finish(), "");
}
TEST(Utf8Pieces, WhatCannotBecomeACharacterIsReplaced) {
  EXPECT_EQ(as_utf8("a\xff"
                    "b"),
            "a\ufffdb");
  EXPECT_EQ(as_utf8("\xe2\x82"), "\ufffd\ufffd");  // cut off
  EXPECT_EQ(as_utf8("\xe2g"), "\ufffdg");          // another character instead
  EXPECT_EQ(as_utf8("\x80\xf0\x9f\x98\x80"), "\ufffd😀");
}

}  // namespace
}  // namespace chorale::train
