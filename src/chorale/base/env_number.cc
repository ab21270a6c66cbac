#include "chorale/base/env_number.h"

#include <charconv>

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/printable.h"

namespace chorale::config {

std::optional<int64_t> whole_number(const char* variable, int64_t least, int64_t most) {
  const auto text = env(variable);
  if (!text) return std::nullopt;
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
  CHORALE_CHECK(error == std::errc() && end == text->data() + text->size() && number >= least && number <= most,
                "[environment] ", variable, " is '", printable(*text), "'; it takes a whole number from ", least,
                " to ", most, ". Correct it, or unset it");
  return number;
}

bool is_on(const char* variable, bool otherwise) {
  const auto text = env(variable);
  CHORALE_CHECK(!text || *text == "0" || *text == "1", "[environment] ", variable, " is '",
                printable(text.value_or("")), "'; it takes 0 or 1. Correct it, or unset it");
  return text ? *text == "1" : otherwise;
}

}  // namespace chorale::config
