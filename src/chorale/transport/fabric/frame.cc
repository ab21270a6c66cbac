#include "chorale/transport/fabric/frame.h"

#include <cstring>

#include "chorale/base/crc32c.h"
#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

uint64_t most_bytes(FrameKind kind) {
  switch (kind) {
    case FrameKind::kEager:
      return Fabric::kEagerBytes;
    case FrameKind::kChunk:
      return kChunkBytes;
    case FrameKind::kAnnounce:
    case FrameKind::kFiller:
      return kMaxMessageBytes;
    case FrameKind::kCredit:
      return kCreditBytes;
    case FrameKind::kReady:
    case FrameKind::kSkip:
    case FrameKind::kWithdraw:
    case FrameKind::kHello:
      break;
  }
  return 0;
}

}  // namespace

Frame make_frame(FrameKind kind, uint64_t id, uint64_t bytes) {
  Frame frame;
  frame.kind = kind;
  frame.id = id;
  frame.bytes = bytes;
  return frame;
}

Frame seal(Frame frame) {
  frame.head_checksum = 0;
  frame.head_checksum = crc32c(std::as_bytes(std::span(&frame, 1)));
  return frame;
}

Frame parse_frame(std::span<const std::byte, kFrameBytes> bytes) {
  Frame frame;
  std::memcpy(&frame, bytes.data(), bytes.size());
  CHORALE_CHECK(seal(frame).head_checksum == frame.head_checksum, "[fabric] a frame is damaged: its checksum is wrong");
  CHORALE_CHECK(frame.magic == Frame::kMagic && frame.kind >= FrameKind::kEager && frame.kind <= FrameKind::kHello,
                "[fabric] no frame of ours: magic ", frame.magic, ", kind ", static_cast<int>(frame.kind));
  CHORALE_CHECK(frame.bytes <= most_bytes(frame.kind), "[fabric] a frame of kind ", static_cast<int>(frame.kind),
                " with ", frame.bytes, " bytes; at most ", most_bytes(frame.kind));
  const bool has_offset = frame.kind == FrameKind::kChunk || frame.kind == FrameKind::kFiller;
  CHORALE_CHECK(frame.offset <= (has_offset ? kMaxMessageBytes : 0), "[fabric] a frame at offset ", frame.offset);
  return frame;
}

void check_checksum(uint32_t said, uint32_t found, int from) {
  CHORALE_CHECK(found == said, "[fabric] rank ", from,
                " sent a message whose checksum is wrong: its memory, or ours, or the network changed it");
}

size_t body_bytes(const Frame& frame) {
  return frame.kind == FrameKind::kEager || frame.kind == FrameKind::kChunk ? frame.bytes : 0;
}

}  // namespace chorale::transport
