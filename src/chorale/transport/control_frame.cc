#include "chorale/transport/control_frame.h"

#include <array>
#include <cstring>

#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

using Header = std::array<uint32_t, 2>;
constexpr size_t kStatusBytes = 8 * sizeof(uint64_t);

bool fits(ControlKind kind, size_t bytes) {
  switch (kind) {
    case ControlKind::kStatus:
      return bytes == kStatusBytes;
    case ControlKind::kNotice:
    case ControlKind::kDrop:
      return bytes <= kMaxNoticeBytes;
    case ControlKind::kGoodbye:
      return bytes == 0;
  }
  return false;
}

}  // namespace

std::string encode_control_frame(ControlKind kind, std::string_view body) {
  CHORALE_INVARIANT(fits(kind, body.size()), "a control frame of ", body.size(), " bytes");
  const Header header{static_cast<uint32_t>(kind), static_cast<uint32_t>(body.size())};
  std::string frame(reinterpret_cast<const char*>(header.data()), sizeof header);
  return frame.append(body);
}

std::optional<ControlFrame> take_control_frame(std::string_view& bytes) {
  Header header;
  if (bytes.size() < sizeof header) return std::nullopt;
  std::memcpy(header.data(), bytes.data(), sizeof header);
  const auto kind = static_cast<ControlKind>(header[0]);
  const size_t size = header[1];
  CHORALE_CHECK(fits(kind, size), "[fabric] a control frame of kind ", header[0], " and ", size, " bytes");
  if (bytes.size() < sizeof header + size) return std::nullopt;
  const ControlFrame frame{kind, bytes.substr(sizeof header, size)};
  bytes.remove_prefix(sizeof header + size);
  return frame;
}

}  // namespace chorale::transport
