// How a call looks to the other ranks.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

#include "chorale/comm/call.h"
#include "chorale/transport/shm/group_segment.h"

namespace chorale::comm {

// What a call is: equal on all ranks, or the call is an error. It travels as four words, on one host (shm::CallSlot)
// and between hosts (transport::Envelope).
struct Fingerprint {
  uint8_t kind = 0, dtype = 0, reduce = 0, variant = 0;
  int32_t root = -1;
  uint64_t count = 0;   // elements per chunk; 0 where chunks differ
  uint64_t detail = 0;  // a hash of what else must be equal: sizes of chunks, a factor
  uint64_t tag = 0;     // the caller's

  using Words = transport::shm::CallWords;
  Words words() const { return std::bit_cast<Words>(*this); }
  static Fingerprint of(const Words& words) { return std::bit_cast<Fingerprint>(words); }
  friend bool operator==(const Fingerprint& a, const Fingerprint& b) { return a.words() == b.words(); }
};
static_assert(sizeof(Fingerprint) == sizeof(Fingerprint::Words));
// Variants, as bits: payloads carry checksums; bytes stay on a device that ranks share.
inline constexpr uint8_t kChecksummed = 1, kOnDevice = 2;

inline CallKind kind_of(const Fingerprint& print) { return static_cast<CallKind>(print.kind); }
// "all_reduce of 1000 f32 (sum)", with what distinguishes calls.
std::string describe(const Fingerprint& print);

}  // namespace chorale::comm
