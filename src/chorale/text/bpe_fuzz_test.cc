#include "chorale/base/error.h"
#include "chorale/testing/fuzz_test_util.h"
#include "chorale/text/bpe.h"

namespace {

using chorale::text::Bpe;

// A line of text, a line of further tokens for a vocabulary that has all bytes, and the merges. The vocabulary is built
// here, since random changes would never keep 256 bytes whole; json_fuzz_test.cc covers the rest of it.
void run(std::string_view input) {
  const size_t first = std::min(input.find('\n'), input.size());
  const std::string_view text = input.substr(0, first);
  input.remove_prefix(std::min(first + 1, input.size()));
  const size_t second = std::min(input.find('\n'), input.size());
  std::string vocab = "{";
  for (int i = 0; i < 256; ++i) {
    const std::string key = chorale::text::printable(std::string(1, static_cast<char>(i)));
    vocab += (i ? ",\"" : "\"") + (key == "\"" || key == "\\" ? "\\" + key : key) + "\":" + std::to_string(i);
  }
  vocab += std::string(input.substr(0, second)) + "}";
  input.remove_prefix(std::min(second + 1, input.size()));

  const Bpe bpe = Bpe::parse(vocab, input);
  CHORALE_INVARIANT(bpe.decode(bpe.encode(text)) == text, "another text came back");
}

}  // namespace

CHORALE_FUZZ(Bpe, {"abcab\xff it's  abc\n,\"ab\":256,\"abc\":257\n#version: 0.2\na b\nab c\n",
                   "<|end|>\n,\"<|end|>\":257,\"\xc4\xa0t\":256\n\xc4\xa0 t\n", "\n\n"}) {
  run(input);
}
