// Inside CRC-32C: the way of processors that have no wide products of polynomials.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace chorale {

// Returns what crc32c() returns.
uint32_t crc32c_in_lanes(std::span<const std::byte> bytes, uint32_t before);

}  // namespace chorale
