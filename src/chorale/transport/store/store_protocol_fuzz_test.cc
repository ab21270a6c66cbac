#include <stdexcept>

#include "chorale/testing/fuzz_test_util.h"
#include "chorale/transport/store/store_protocol.h"

namespace chorale::transport {
namespace {

std::vector<std::string> messages() {
  return {encode(StoreRequest{StoreCall::kSet, 0, {"key", "value"}}),
          encode(StoreRequest{StoreCall::kWait, -1, {"a", "", "c"}}),
          encode(StoreRequest{StoreCall::kCompareSet, 7, {"a", "b", "c"}}),
          encode(StoreRequest{StoreCall::kCount, 0, {}}),
          encode(StoreRequest{StoreCall::kWill, 0, {"a", "b"}}),
          encode(StoreRequest{StoreCall::kWho, 0, {}}),
          encode(StoreReply{}),
          encode(StoreReply{StoreStatus::kTimeout, 1, {"a", "b"}})};
}

// One meaning has one spelling.
CHORALE_FUZZ(StoreProtocol, messages()) {
  const auto request = decode_request(input);
  if (request && encode(*request) != input) throw std::logic_error("a request that is spelt in two ways");
  const auto reply = decode_reply(input);
  if (reply && encode(*reply) != input) throw std::logic_error("a reply that is spelt in two ways");
}

}  // namespace
}  // namespace chorale::transport
