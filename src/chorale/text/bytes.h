// The simplest tokenizer: a token is a byte.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chorale/base/error.h"

namespace chorale::text {

struct Bytes {
  static constexpr int32_t size() { return 256; }
  static std::vector<int32_t> encode(std::string_view text) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
    return {bytes, bytes + text.size()};
  }
  static std::string decode(std::span<const int32_t> ids) {
    std::string text;
    for (const int32_t id : ids) {
      CHORALE_CHECK(id >= 0 && id < size(), "[Bytes] there is no token ", id, " in a vocabulary of ", size());
      text += static_cast<char>(id);
    }
    return text;
  }
};

}  // namespace chorale::text
