#include <stdexcept>

#include "chorale/base/error.h"
#include "chorale/comm/notice.h"
#include "chorale/testing/fuzz_test_util.h"

namespace chorale::comm {
namespace {

CHORALE_FUZZ(Notices, {encode({Notice::Kind::kFailed, 3, 17, {}, "rank 3 has left"}), encode({})}) {
  const auto notice = decode_notice(input);
  CHORALE_CHECK(notice, "no notice");
  describe(notice->print);
  if (encode(*notice) != input) throw std::logic_error("a notice that is encoded otherwise than it came");
}

}  // namespace
}  // namespace chorale::comm
