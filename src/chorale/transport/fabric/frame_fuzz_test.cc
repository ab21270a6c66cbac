#include <cstring>
#include <stdexcept>

#include "chorale/base/error.h"
#include "chorale/testing/fuzz_test_util.h"
#include "chorale/transport/fabric/frame.h"

namespace chorale::transport {
namespace {

std::string frame_bytes(FrameKind kind, uint64_t bytes, uint64_t offset) {
  Frame frame;
  frame.kind = kind;
  frame.bytes = bytes;
  frame.offset = offset;
  frame = seal(frame);
  return {reinterpret_cast<const char*>(&frame), sizeof frame};
}

// Both as it came, and with a checksum that is right, so that the other checks are reached.
CHORALE_FUZZ(Frames, {frame_bytes(FrameKind::kEager, 100, 0), frame_bytes(FrameKind::kChunk, kChunkBytes, 1 << 20),
                      frame_bytes(FrameKind::kFiller, 1 << 30, 5), frame_bytes(FrameKind::kCredit, kCreditBytes, 0)}) {
  CHORALE_CHECK(input.size() >= kFrameBytes, "too short");
  Frame frame;
  std::memcpy(&frame, input.data(), sizeof frame);
  frame = seal(frame);
  for (const std::string_view bytes : {input, {reinterpret_cast<const char*>(&frame), sizeof frame}}) {
    Frame parsed;
    try {
      parsed = parse_frame(std::as_bytes(std::span(bytes)).first<kFrameBytes>());
    } catch (const InvalidArgument&) {
      continue;
    }
    if (body_bytes(parsed) > kChunkBytes || parsed.offset + parsed.bytes < parsed.bytes) {
      throw std::logic_error("a frame with impossible lengths");
    }
  }
}

}  // namespace
}  // namespace chorale::transport
