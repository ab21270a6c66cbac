#include <string>

#include "chorale/testing/fuzz_test_util.h"
#include "chorale/transport/fabric/control_frame.h"

namespace chorale::transport {
namespace {

CHORALE_FUZZ(ControlFrames, {encode_control_frame(ControlKind::kNotice, "group 7 has failed") +
                                 encode_control_frame(ControlKind::kGoodbye, {}),
                             encode_control_frame(ControlKind::kStatus, std::string(64, 's'))}) {
  size_t bytes = 0;
  while (const auto frame = take_control_frame(input)) bytes += frame->body.size();
  if (bytes > input.size() + 100 * kMaxNoticeBytes) throw std::logic_error("bodies that were never sent");
}

}  // namespace
}  // namespace chorale::transport
