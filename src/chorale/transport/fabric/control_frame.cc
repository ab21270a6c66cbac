#include "chorale/transport/fabric/control_frame.h"

#include <array>
#include <cstring>
#include <span>

#include "chorale/base/crc32c.h"
#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

using Header = std::array<uint32_t, 3>;
constexpr size_t kStatusBytes = 8 * sizeof(uint64_t);

uint32_t checksum(ControlKind kind, std::string_view body) {
  const std::array words{static_cast<uint32_t>(kind), static_cast<uint32_t>(body.size())};
  return crc32c(std::as_bytes(std::span(body)), crc32c(std::as_bytes(std::span(words))));
}

bool fits(ControlKind kind, size_t bytes) {
  switch (kind) {
    case ControlKind::kStatus:
      return bytes == kStatusBytes;
    case ControlKind::kNotice:
    case ControlKind::kDrop:
    case ControlKind::kAccuse:
      return bytes <= kMaxNoticeBytes;
    case ControlKind::kGoodbye:
      return bytes == 0;
  }
  return false;
}

}  // namespace

std::string encode_control_frame(ControlKind kind, std::string_view body) {
  CHORALE_INVARIANT(fits(kind, body.size()), "a control frame of ", body.size(), " bytes");
  const Header header{static_cast<uint32_t>(kind), static_cast<uint32_t>(body.size()), checksum(kind, body)};
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
  CHORALE_CHECK(header[2] == checksum(kind, frame.body), "[fabric] a control frame is damaged: its checksum is wrong");
  bytes.remove_prefix(sizeof header + size);
  return frame;
}

}  // namespace chorale::transport
