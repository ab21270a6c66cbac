#include "chorale/text/unicode.h"

#include <algorithm>
#include <array>
#include <iterator>

namespace chorale::text {
namespace {

struct Range {
  uint32_t first, last;
};
#include "chorale/text/unicode_ranges.inc"
struct Replacement {
  uint32_t code, first, second = 0, third = 0;
};
#include "chorale/text/unicode_folds.inc"
constexpr Range kSpaces[] = {{0x9, 0xd},       {0x20, 0x20},     {0x85, 0x85},     {0xa0, 0xa0},     {0x1680, 0x1680},
                             {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000}};

template <size_t N>
constexpr bool contains(const Range (&ranges)[N], uint32_t code) {
  const Range* range = std::upper_bound(std::begin(ranges), std::end(ranges), code,
                                        [](uint32_t value, const Range& r) { return value < r.first; });
  return range != std::begin(ranges) && code <= std::prev(range)->last;
}

constexpr CharKind find_kind(uint32_t code) {
  if (contains(kLetters, code)) return CharKind::kLetter;
  if (contains(kNumbers, code)) return CharKind::kNumber;
  return contains(kSpaces, code) ? CharKind::kSpace : CharKind::kOther;
}

// Most text is found here.
constexpr auto kFirstKinds = [] {
  std::array<CharKind, 256> kinds{};
  for (uint32_t code = 0; code < kinds.size(); ++code) kinds[code] = find_kind(code);
  return kinds;
}();

template <size_t N>
void append_replaced(const Replacement (&table)[N], std::u32string& text, uint32_t code) {
  const Replacement* row = std::lower_bound(std::begin(table), std::end(table), code,
                                            [](const Replacement& r, uint32_t value) { return r.code < value; });
  if (row == std::end(table) || row->code != code) {
    text += static_cast<char32_t>(code);
    return;
  }
  for (const uint32_t part : {row->first, row->second, row->third}) {
    if (part != 0) text += static_cast<char32_t>(part);
  }
}

}  // namespace

CharKind kind_of(uint32_t code) { return code < kFirstKinds.size() ? kFirstKinds[code] : find_kind(code); }
bool is_punctuation(uint32_t code) { return contains(kPunctuation, code); }
bool is_mark(uint32_t code) { return contains(kMarks, code); }
bool is_invisible(uint32_t code) { return contains(kInvisible, code); }

void append_without_accents(std::u32string& text, uint32_t code) {
  // A Hangul syllable is a leading consonant, a vowel, and perhaps a trailing consonant, numbered in this order.
  constexpr uint32_t kSyllables = 0xac00, kCount = 11172, kLeading = 0x1100, kVowels = 0x1161, kTrailing = 0x11a7;
  constexpr uint32_t kOfVowel = 28, kOfLeading = 21 * kOfVowel;
  if (code - kSyllables < kCount) {
    const uint32_t index = code - kSyllables;
    text += static_cast<char32_t>(kLeading + index / kOfLeading);
    text += static_cast<char32_t>(kVowels + index % kOfLeading / kOfVowel);
    if (index % kOfVowel != 0) text += static_cast<char32_t>(kTrailing + index % kOfVowel);
  } else if (!is_mark(code)) {
    append_replaced(kWithoutAccents, text, code);
  }
}
void append_lower_case(std::u32string& text, uint32_t code) { append_replaced(kLowerCase, text, code); }

Char char_at(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[at + i]); };
  const uint8_t first = byte(0);
  const Char invalid{.code = first, .bytes = 1, .valid = false};
  if (first < 0x80) return {.code = first};
  const uint8_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() - at < bytes) return invalid;
  uint32_t code = first & (0x7fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return invalid;
    code = code << 6 | (byte(i) & 0x3f);
  }
  // What is too long for what it says is invalid; so are surrogates, and what is beyond Unicode.
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  if (code < kSmallest[bytes] || (code >= 0xd800 && code <= 0xdfff) || code > 0x10ffff) return invalid;
  return {.code = code, .bytes = bytes};
}

void append_utf8(std::string& text, uint32_t code) {
  const auto add = [&](uint32_t byte) { text += static_cast<char>(byte); };
  if (code < 0x80) {
    add(code);
  } else if (code < 0x800) {
    add(0xc0 | code >> 6);
    add(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    add(0xe0 | code >> 12);
    add(0x80 | (code >> 6 & 0x3f));
    add(0x80 | (code & 0x3f));
  } else {
    add(0xf0 | code >> 18);
    add(0x80 | (code >> 12 & 0x3f));
    add(0x80 | (code >> 6 & 0x3f));
    add(0x80 | (code & 0x3f));
  }
}

}  // namespace chorale::text
