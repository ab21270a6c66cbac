#include <stdexcept>

#include "chorale/testing/fuzz_test_util.h"
#include "chorale/transport/tls/tls_stream.h"

namespace chorale::transport {
namespace {

CHORALE_FUZZ(StreamIdentities, {StreamIdentity{"0123456789abcdef-1-2", "fedcba9876543210-3-4", 3, 1, 2}.text(),
                                StreamIdentity{"", "", 0, 0, 0}.text()}) {
  const auto identity = StreamIdentity::parse(input);
  if (identity && identity->text() != input) throw std::logic_error("two spellings of one identity");
}

}  // namespace
}  // namespace chorale::transport
