#include <stdexcept>
#include <string>
#include <vector>

#include "chorale/testing/fuzz_test_util.h"
#include "chorale/transport/tls/tls_records.h"

namespace chorale::transport {
namespace {

const Digest kSecret = hmac_sha256("of a test", {"traffic"});

std::string sealed(std::string_view data) {
  ByteQueue out;
  RecordKey(kSecret, false).seal({}, std::as_bytes(std::span(data)), out);
  return {reinterpret_cast<const char*>(out.bytes().data()), out.size()};
}

// A sender that does not know the key gets nothing through, and cannot make us read beyond what came.
CHORALE_FUZZ(Records, {sealed("data"), sealed(std::string(20000, 'x')), sealed("")}) {
  RecordKey key(kSecret, true);
  std::vector<std::byte> into;
  for (auto in = std::as_bytes(std::span(input)); const auto room = RecordKey::room_for(in);) {
    into.resize(*room);
    const auto opened = key.open(in, into);
    if (opened.taken > in.size() || opened.bytes > *room) throw std::logic_error("more than there is");
    in = in.subspan(opened.taken);
  }
}

}  // namespace
}  // namespace chorale::transport
