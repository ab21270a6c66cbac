#include "chorale/base/error.h"
#include "chorale/testing/fuzz_test_util.h"
#include "chorale/text/bpe.h"

// Training on any bytes gives a vocabulary that encodes them, and others, exactly.
CHORALE_FUZZ(BpeTrain,
             {"the cat sat on the mat; the cat's hat", "aaaaaaaaaaaaaaaaabaaaaaaab", "\xff\xfe\xff\xfe  \n\n é é"}) {
  const auto bpe = chorale::text::Bpe::train(input, {.vocab_size = 300});
  CHORALE_INVARIANT(bpe.decode(bpe.encode(input)) == input, "another text came back");
}
