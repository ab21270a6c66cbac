#include "chorale/base/error.h"
#include "chorale/testing/fuzz_test_util.h"
#include "chorale/text/wordpiece.h"

// A line of text, and a vocabulary.
CHORALE_FUZZ(WordPiece,
             {"The unaffable c\xc3\xa1t\xff\n[UNK]\nthe\nun\n##aff\n##able\ncat\n", "\n[UNK]", "#\n##\n[UNK]\n"}) {
  const size_t end = std::min(input.find('\n'), input.size());
  using chorale::text::WordPiece;
  for (const bool lower_case : {true, false}) {
    const WordPiece pieces =
        WordPiece::parse(input.substr(std::min(end + 1, input.size())), {.lower_case = lower_case});
    const std::vector<int32_t> ids = pieces.encode(input.substr(0, end));
    CHORALE_INVARIANT(ids.size() <= 2 * end, "more tokens than the text has parts of characters");
    pieces.decode(ids);
  }
}
