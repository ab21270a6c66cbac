#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/io/tokens.h"
#include "chorale/testing/fuzz_test_util.h"

CHORALE_FUZZ(TokenShard, {chorale::fuzz::bytes_of(20240520, 1, 2) + std::string(1012, '\0') + "abcd"}) {
  std::vector<int32_t> aligned(input.size() / sizeof(int32_t) + 1);  // as a mapping is
  std::copy(input.begin(), input.end(), reinterpret_cast<char*>(aligned.data()));
  const auto bytes = std::as_bytes(std::span(aligned)).first(input.size());
  const auto tokens = chorale::io::parse_token_shard("input", bytes);
  CHORALE_INVARIANT(1024 + tokens.size_bytes() == input.size(), "the tokens do not fill the file");
}
