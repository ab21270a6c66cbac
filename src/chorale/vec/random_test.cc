#include "chorale/vec/random.h"

#include <gtest/gtest.h>

#include <vector>

#include "chorale/vec/target.h"

namespace chorale::vec {
namespace {

TEST(RandomWords, AreTheWordsOfTheStreamFromAnyPlaceOnEveryTarget) {
  // The offset is such that the counter's lower half overflows within the stretch.
  const RandomStream stream{0x123456789abcdef0, 0xfffffffc};
  for (const char* target : available_targets()) {
    force_target(target);
    for (uint64_t first : {0, 1, 3, 4, 17}) {
      for (int64_t n : {0, 1, 2, 7, 64, 131}) {
        std::vector<uint32_t> words(static_cast<size_t>(n) + 1, 0xdeadbeef);
        random_words(stream, first, words.data(), n);
        for (int64_t i = 0; i < n; ++i) {
          ASSERT_EQ(words[static_cast<size_t>(i)], base::random_word(stream, first + static_cast<uint64_t>(i)))
              << target << " first " << first << " n " << n << " i " << i;
        }
        EXPECT_EQ(words.back(), 0xdeadbeef);
      }
    }
  }
  force_target(nullptr);
}

}  // namespace
}  // namespace chorale::vec
