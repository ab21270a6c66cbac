// Checksums that tell whether bytes are still those that were written.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace chorale::io {

// SHA-256, as 64 hexadecimal digits.
std::string sha256(std::span<const std::byte> bytes);
inline std::string sha256(std::string_view text) { return sha256(std::as_bytes(std::span(text.data(), text.size()))); }

}  // namespace chorale::io
