#include "chorale/base/printable.h"

#include <cstdint>

namespace chorale {

bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0}; };
    const uint8_t first = byte(at);
    const size_t length = first < 0x80                    ? 1
                          : first >= 0xc2 && first < 0xe0 ? 2
                          : first >= 0xe0 && first < 0xf0 ? 3
                          : first >= 0xf0 && first < 0xf5 ? 4
                                                          : 0;
    if (length == 0) return false;
    for (size_t i = 1; i < length; ++i) {
      if ((byte(at + i) & 0xc0) != 0x80) return false;
    }
    const uint8_t second = byte(at + 1);
    const bool overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
    const bool outside = (first == 0xed && second >= 0xa0) || (first == 0xf4 && second >= 0x90);
    if (overlong || outside) return false;
    at += length;
  }
  return true;
}

std::string printable(std::string_view text) {
  if (is_utf8(text)) return std::string(text);
  constexpr const char* kDigits = "0123456789abcdef";
  std::string shown;
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte >= ' ' && byte < 127) {
      shown += c;
    } else {
      shown += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return shown;
}

}  // namespace chorale
