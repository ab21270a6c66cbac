// What travels between two ranks beside the control connections: a head of fixed size, then the bytes that it
// announces.
//
// Note [Messages between two ranks]
// A small message goes at once, as kEager, while the sender has credit (transport/fabric/credit.h). A large one, or one
// without credit, is announced; the answer is kReady (the caller has given its memory) or kSkip (its memory is of
// another size). Then its bytes go where the receiver wants them. Matching follows the order of kEager and kAnnounce,
// which use the same connection. A sender that takes its memory back says kWithdraw.
//
// Note [Connections of the tls fabric]
// A pair of ranks has, in each direction, one connection for short frames and some for bulk; so a writer and a
// reader never share one. The bulk connections take chunks as fast as they can, and the receiver stores each where it
// belongs. If chunks of a message that is taken back are already under way, kFiller comes in place of the rest: chunks
// without bytes. (How ucx sends the bytes of a large message is its own business: Note [Messages of the ucx fabric].)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "chorale/transport/fabric/fabric.h"

namespace chorale::transport {

enum class FrameKind : uint16_t { kEager = 1, kAnnounce, kReady, kSkip, kWithdraw, kCredit, kChunk, kFiller, kHello };

// The frame as it is on the wire (little-endian, as all hosts that we run on).
struct Frame {
  static constexpr uint32_t kMagic = 0x4d5f4843;

  uint32_t magic = kMagic;
  FrameKind kind = FrameKind::kCredit;
  uint16_t has_checksum = 0;
  uint32_t checksum = 0;       // CRC-32C of the bytes that follow; over ucx, of those that kAnnounce announces, too
  uint32_t head_checksum = 0;  // of the frame itself, with 0 in this place: a head that is damaged is always found
  uint64_t channel = 0;        // of kEager and kAnnounce
  uint64_t id = 0;             // of an announced message, counted by its sender
  uint64_t offset = 0;         // of a chunk in its message
  uint64_t bytes = 0;          // of the message, the chunk, the credit
  Envelope envelope;           // of kEager and kAnnounce
};
inline constexpr size_t kFrameBytes = sizeof(Frame);
static_assert(kFrameBytes == 96);

inline constexpr size_t kChunkBytes = 128 << 10;
inline constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 48;
// Bytes of small messages that a receiver keeps for one peer until its caller asks for them.
inline constexpr uint64_t kCreditBytes = 4 << 20;

Frame make_frame(FrameKind kind, uint64_t id, uint64_t bytes);
// The frame with its head_checksum: TLS guards what is on the wire, this what a faulty memory makes of it before. UCX
// guards nothing.
Frame seal(Frame frame);
// Throws InvalidArgument when the bytes are no frame, or one with lengths that no sender of ours uses.
Frame parse_frame(std::span<const std::byte, kFrameBytes> bytes);
// Throws InvalidArgument when the bytes that came from this rank have another checksum than its frame says.
void check_checksum(uint32_t said, uint32_t found, int from);
// How many bytes follow.
size_t body_bytes(const Frame& frame);

}  // namespace chorale::transport
