// As much of Unicode as cutting text into words needs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace chorale::text {

// Letters and numbers are the general categories L and N, spaces the property White_Space.
enum class CharKind : uint8_t { kLetter, kNumber, kSpace, kOther };
CharKind kind_of(uint32_t code);

struct Char {
  uint32_t code = 0;
  uint8_t bytes = 1;
  bool valid = true;  // false: a byte that is not UTF-8 here; `code` is the byte
};
// The character that begins at text[at], which must be inside.
Char char_at(std::string_view text, size_t at);
// Precondition: a code point, no surrogate.
void append_utf8(std::string& text, uint32_t code);

}  // namespace chorale::text
