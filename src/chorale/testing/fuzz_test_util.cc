#include "chorale/testing/fuzz_test_util.h"

#include <algorithm>
#include <fstream>

#include "chorale/base/error.h"
#include "chorale/base/philox.h"

namespace chorale::fuzz {
namespace {

// Random numbers of one mutation: a function of its number only, so that a failure can be repeated alone.
class Dice {
 public:
  explicit Dice(uint64_t mutation) : stream_{mutation, 0} {}
  // A number below `bound`, which is at least 1.
  size_t below(size_t bound) { return base::random_word(stream_, next_++) % bound; }
  template <class List>
  auto pick(const List& list) {
    return list[below(std::size(list))];
  }

 private:
  RandomStream stream_;
  uint64_t next_ = 0;
};

// Numbers that lengths and counts are compared with, and characters that grammars are made of.
constexpr uint64_t kEdges[] = {0,
                               1,
                               7,
                               8,
                               127,
                               128,
                               255,
                               256,
                               0x7fff,
                               0xffff,
                               0x7fffffff,
                               0xffffffff,
                               uint64_t{1} << 62,
                               uint64_t{1} << 63,
                               ~uint64_t{0},
                               ~uint64_t{0} - 7};
constexpr std::string_view kMarks = "{}[]\",:-0918.e\\\n\t ()'\0\x7f\x80\xc0\xff";

void mutate_once(std::string& text, const std::vector<std::string>& seeds, Dice& dice) {
  const size_t at = dice.below(text.size() + 1), length = std::min(dice.below(17), text.size() - at);
  switch (dice.below(8)) {
    case 0:
      if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << dice.below(8)));
      break;
    case 1:
      if (at < text.size()) text[at] = dice.pick(kMarks);
      break;
    case 2:
      text.insert(at, 1, dice.pick(kMarks));
      break;
    case 3:
      text.erase(at, length);
      break;
    case 4:
      text.insert(dice.below(text.size() + 1), text.substr(at, length));
      break;
    case 5:
      text.resize(at);
      break;
    case 6: {  // a number of 1, 2, 4 or 8 bytes, of either endianness
      std::string number = bytes_of(dice.pick(kEdges)).substr(0, size_t{1} << dice.below(4));
      if (dice.below(2) == 1) std::reverse(number.begin(), number.end());
      text.replace(at, std::min(number.size(), text.size() - at), number);
      break;
    }
    default: {  // the end of another seed
      const std::string other = dice.pick(seeds);
      text = text.substr(0, at) + other.substr(dice.below(other.size() + 1));
    }
  }
}

// The input in a form that fits into a C++ string literal.
std::string quoted(std::string_view input) {
  std::string result = "\"";
  for (const char c : input) {
    const auto byte = static_cast<uint8_t>(c);
    constexpr const char* kHex = "0123456789abcdef";
    if (byte >= 0x20 && byte < 0x7f && c != '"' && c != '\\') {
      result += c;
    } else {
      result += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15], '"', '"'};  // a hexadecimal escape ends with its literal
    }
  }
  return result + '"';
}

std::string failure(const char* what, std::string_view input, const std::string& found) {
  return concat(what, " of ", input.size(), " bytes, ", quoted(input.substr(0, 2000)), ": ", found);
}

}  // namespace

void run(const Target& target, std::string_view input) {
  try {
    target.run(input);
  } catch (const InvalidArgument&) {  // NOLINT(bugprone-empty-catch): the expected answer
  }
}

std::string replay(const Target& target, int mutations) {
  const std::vector<std::string> seeds = target.seeds();
  for (const std::string& seed : seeds) {
    try {
      target.run(seed);
    } catch (const std::exception& error) {
      return failure("a seed", seed, error.what());
    }
  }
  const auto try_one = [&](const char* what, const std::string& input) -> std::string {
    // A buffer of its own, of just this size, lets AddressSanitizer see one byte too far.
    const std::vector<char> exact(input.begin(), input.end());
    try {
      run(target, {exact.data(), exact.size()});
    } catch (const std::exception& error) {
      return failure(what, input, error.what());
    }
    return {};
  };
  for (const std::string& seed : seeds) {
    const size_t step = seed.size() / 300 + 1;
    for (size_t size = 0; size < seed.size(); size += step) {
      if (std::string found = try_one("a truncated seed", seed.substr(0, size)); !found.empty()) return found;
    }
  }
  for (int i = 0; i < mutations; ++i) {
    Dice dice(static_cast<uint64_t>(i));
    std::string input = dice.pick(seeds);
    for (size_t times = 1 + dice.below(6); times > 0; --times) mutate_once(input, seeds, dice);
    if (std::string found = try_one("a mutation", input); !found.empty()) return found;
  }
  return {};
}

void write_seeds(const Target& target, const std::string& folder) {
  int number = 0;
  for (const std::string& seed : target.seeds()) {
    std::ofstream(folder + "/seed-" + std::to_string(number++), std::ios::binary) << seed;
  }
}

}  // namespace chorale::fuzz
