#include "chorale/launch/elastic_limits.h"

#include <algorithm>
#include <charconv>

#include "chorale/base/error.h"

namespace chorale::launch {
namespace {

constexpr int kMostMembers = 4096;

int number_of(const std::string& word, const std::string& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  CHORALE_CHECK(!word.empty() && error == std::errc() && end == word.data() + word.size() && number >= 1 &&
                    number <= kMostMembers,
                "--elastic takes MIN:MAX, such as 2:8, two numbers of ranks from 1 to ", kMostMembers, ", not '", text,
                "'");
  return number;
}

}  // namespace

ElasticLimits ElasticLimits::parse(const std::string& text) {
  const size_t colon = std::min(text.find(':'), text.size());
  const ElasticLimits limits{number_of(text.substr(0, colon), text),
                             number_of(colon < text.size() ? text.substr(colon + 1) : "", text)};
  CHORALE_CHECK(limits.least <= limits.most, "--elastic ", text, ": MIN is more than MAX");
  return limits;
}

}  // namespace chorale::launch
