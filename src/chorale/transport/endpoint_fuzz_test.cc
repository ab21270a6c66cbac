#include <stdexcept>

#include "chorale/testing/fuzz_test_util.h"
#include "chorale/transport/socket.h"

namespace chorale::transport {
namespace {

CHORALE_FUZZ(Endpoint, {"node1:29500", "[fe80::1]:1", "unix:name"}) {
  const std::string text = Endpoint::parse(input).text();
  if (Endpoint::parse(text).text() != text) throw std::logic_error("text() is not what parse() takes");
}

}  // namespace
}  // namespace chorale::transport
