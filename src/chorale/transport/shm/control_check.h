// Note [Damage]
// The words by which a rank tells others what it does and where its data is (a slot's head, a row of its table, a
// message's head) carry a check: memory that went bad, or a process that wrote where it must not, is found before
// anybody acts on them, and the error names whose words they are. It is on the path of every call, so it is not a CRC
// but a sum of the words, each times a weight. The weights are such that every change of a single byte shows in the
// upper 16 bits (control_check_test.cc tries them all), and other changes with a chance of 65,535 in 65,536.
//
// Payloads are checked on demand (GroupOptions::checksum), with a CRC.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace chorale::transport::shm {

inline constexpr uint64_t kCheckWeights[] = {0x51c9bc701e7ea419, 0xf38b2ffc80a4df5b, 0xa5aec7978306d03b,
                                             0xe255accb1a466885, 0xe512148239292d23, 0x9f19950499dd251d};

// The weighted sum of words, of which the first gets the weight number `First`; sums of parts are added up.
template <size_t First = 0, class... Words>
constexpr uint64_t weigh(Words... words) {
  static_assert(First + sizeof...(words) <= std::size(kCheckWeights));
  uint64_t sum = 0;
  size_t at = First;
  ((sum += static_cast<uint64_t>(words) * kCheckWeights[at++]), ...);
  return sum;
}
// The check of a weighted sum. It is not 0 for words that are all 0.
constexpr uint16_t check_of(uint64_t sum) { return static_cast<uint16_t>(~sum >> 48); }

}  // namespace chorale::transport::shm
