// The part of Unicode that cutting text into words, and BERT's way of simplifying it, need.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace chorale::text {

// Letters and numbers are the general categories L and N, spaces the property White_Space.
enum class CharKind : uint8_t { kLetter, kNumber, kSpace, kOther };
CharKind kind_of(uint32_t code);
bool is_punctuation(uint32_t code);  // the general category P
bool is_mark(uint32_t code);         // accents and the like that stand on the character before: Mn
bool is_invisible(uint32_t code);    // control, format and private-use characters: Cc, Cf, Co

// Appends what is left of a character without its accents: e for é, nothing for a mark.
void append_without_accents(std::u32string& text, uint32_t code);
// Appends the character in lower case, whatever stands around it.
void append_lower_case(std::u32string& text, uint32_t code);

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
