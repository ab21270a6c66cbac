// CRC-32C (Castagnoli) by the processor's own instruction: 8 bytes in a cycle. SSE4.2 is the least that we run on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace chorale {

// The CRC of the bytes, going on from that of the bytes before them.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t before = 0);

}  // namespace chorale
