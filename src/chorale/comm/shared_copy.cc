#include "chorale/comm/shared_copy.h"

#include <emmintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

namespace chorale::comm {
namespace {

constexpr size_t kLine = 64;
// Less is not worth a look at the clock.
constexpr size_t kLeastTimedBytes = 64 << 10;
// A line that another core has written and this one reads takes 3 ns, and one that has to be taken away 30 ns.
constexpr double kSlowNsPerLine = 10;

// How many copies for others are done as the last timed one says. Its plain part alone takes longer than a small copy
// should.
constexpr int kCopiesPerTrial = 64;
// Larger ones are timed each, smaller ones are ordinary.
constexpr size_t kMostRememberedBytes = 64 << 10, kLeastForOthersBytes = 1 << 10;
// The clock and the fence alone take 40 ns, as long as 4 slow lines.
constexpr size_t kLeastTriedBytes = 512;

// The first `tried` bytes tell how to copy the rest. True when that is past the caches.
bool copy_timed(std::byte* to, const std::byte* from, size_t bytes, size_t tried) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  std::memcpy(to, from, tried);
  _mm_mfence();  // a core keeps as many stores as a small copy has, and goes on
  const std::chrono::duration<double, std::nano> time = Clock::now() - start;
  const bool slow = time.count() > kSlowNsPerLine * static_cast<double>(tried / kLine);
  if (slow) {
    copy_past_caches(to + tried, from + tried, bytes - tried);
  } else {
    std::memcpy(to + tried, from + tried, bytes - tried);
  }
  return slow;
}

// What the last timed copy of this thread has shown, and for how many more copies that holds.
struct Trial {
  bool slow = false;
  int holds_for = 0;
};
constinit thread_local Trial last_trial;

}  // namespace

void copy_past_caches(std::byte* to, const std::byte* from, size_t bytes) {
  const size_t head = std::min(bytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    const auto* in = reinterpret_cast<const __m128i*>(from + at);
    auto* out = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1), c = _mm_loadu_si128(in + 2),
                  d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  std::memcpy(to + at, from + at, bytes - at);
  _mm_sfence();  // others see it when they see what is written afterwards
}

void copy_shared(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes < kLeastTimedBytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return;
  }
  copy_timed(to, from, bytes, kTriedBytes);
}

void copy_for_others(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes < kLeastForOthersBytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  } else if (bytes > kMostRememberedBytes || last_trial.holds_for == 0) {
    last_trial = {copy_timed(to, from, bytes, std::clamp(bytes / 4, kLeastTriedBytes, kTriedBytes)), kCopiesPerTrial};
  } else {
    --last_trial.holds_for;
    if (last_trial.slow) return copy_past_caches(to, from, bytes);
    std::memcpy(to, from, bytes);
  }
}

}  // namespace chorale::comm
