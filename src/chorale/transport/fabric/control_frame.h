// What travels on a control connection of the fabric: its kind, its size and its checksum in 4 bytes each, then its
// bytes. TLS finds what is changed on the wire; the checksum also finds what faulty memory did to it on either side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace chorale::transport {

inline constexpr size_t kMaxNoticeBytes = 4096;

enum class ControlKind : uint32_t {
  kStatus = 0xc0de0001,  // the words of Fabric::set_status: this rank lives
  kNotice,
  kGoodbye,
  kDrop,    // the receiver is lost to the sender, for this reason
  kAccuse,  // the same, and the receiver is to blame: it has sent what it must not
};

struct ControlFrame {
  ControlKind kind = ControlKind::kStatus;
  std::string_view body;
};

std::string encode_control_frame(ControlKind kind, std::string_view body);
// Takes the first frame from the front of `bytes`; nothing when it is not whole yet. Throws InvalidArgument when it is
// no frame.
std::optional<ControlFrame> take_control_frame(std::string_view& bytes);

}  // namespace chorale::transport
