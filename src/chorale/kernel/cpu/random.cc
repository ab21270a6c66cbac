#include "chorale/kernel/cpu/random.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/cpu/support/floating.h"
#include "chorale/kernel/random_attrs.h"
#include "chorale/kernel/stretch.h"
#include "chorale/vec/loops.h"
#include "chorale/vec/random.h"

namespace chorale::kernel::cpu {
namespace {

constexpr int64_t kRandomGrainElems = 8192;
constexpr int64_t kChunkElems = 1024;  // even: normals come in pairs

// Calls f(words, skip, at, count) for chunks of elements, with the random words of those elements: `words` begins
// `skip` (0 or 1) elements before element `at`, so that pairs are those of the whole tensor.
template <class F>
void for_each_chunk(const KernelArgs& args, const Tensor& stretch, int64_t words_each, F&& f) {
  const Stretch from(stretch, args.out[0].sizes());
  for_each_run(from, args.out[0].sizes(), [&](int64_t begin_at, int64_t begin_first, int64_t elems) {
    const int64_t skip = begin_first % 2, first = begin_first - skip, all = elems + skip;
    const int64_t chunks = (all + kChunkElems - 1) / kChunkElems;
    parallel_for(chunks, kRandomGrainElems / kChunkElems, [&](int64_t begin, int64_t end) {
      std::array<uint32_t, 2 * kChunkElems> words;
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t start = chunk * kChunkElems, count = std::min(kChunkElems, all - start);
        const int64_t drawn = (count + count % 2) * words_each;  // whole pairs
        vec::random_words(from.stream, static_cast<uint64_t>((first + start) * words_each), words.data(), drawn);
        const int64_t skipped = chunk == 0 ? skip : 0;
        f(words.data(), skipped, begin_at + start - skip + skipped, count - skipped);
      }
    });
  });
}

double unit(const uint32_t* words, int64_t i, bool wide) {
  return wide ? base::uniform_f64(words[2 * i], words[2 * i + 1]) : static_cast<double>(base::uniform_f32(words[i]));
}

template <class T>
T narrow_to(double value) {
  return Scalar(value).to<T>();
}

// The value as a number that others can be compared with.
template <class T>
auto as_number(T value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else {
    return static_cast<float>(value);
  }
}

// The largest number of T below a bound: rounding may lead to the bound itself, which must not be drawn.
template <class T>
T last_below(double bound) {
  if constexpr (std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>) {
    auto last = narrow_to<T>(bound);
    if (static_cast<double>(static_cast<float>(last)) < bound) return last;
    constexpr uint16_t kSign = 0x8000;
    // Neighbours have neighbouring bits; below 0 the next one is farther from it.
    last.bits = last.bits == 0 ? kSign | 1 : static_cast<uint16_t>(last.bits & kSign ? last.bits + 1 : last.bits - 1);
    return last;
  } else {
    const auto last = static_cast<T>(bound);
    return static_cast<double>(last) < bound ? last : std::nextafter(last, -std::numeric_limits<T>::infinity());
  }
}

// A number below `bound` from 64 random bits: the upper half of a product, whose bias is below 2^-64 times the bound.
uint64_t below(uint64_t bound, uint32_t high, uint32_t low) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(uint64_t{high} << 32 | low) * bound) >> 64);
}

}  // namespace

int64_t words_per_element(DType dtype) { return dtype == DType::kF64 ? 2 : 1; }

void uniform(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<RandomAttrs>();
  const Tensor& out = args.out[0];
  const bool wide = out.dtype() == DType::kF64;
  visit_floating(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* data = out.data<T>();
    const auto low = static_cast<float>(attrs.a), range = static_cast<float>(attrs.b - attrs.a);
    // Nothing lies between equal bounds.
    const T last = attrs.a < attrs.b ? last_below<T>(attrs.b) : narrow_to<T>(attrs.b);
    for_each_chunk(args, args.in[0], words_per_element(out.dtype()),
                   [&](const uint32_t* words, int64_t skip, int64_t first, int64_t count) {
                     const auto draw = [&](int64_t i) {
                       if constexpr (std::is_same_v<T, float>) return low + range * base::uniform_f32(words[skip + i]);
                       return narrow_to<T>(attrs.a + (attrs.b - attrs.a) * unit(words, skip + i, wide));
                     };
                     for (int64_t i = 0; i < count; ++i) {
                       const T value = draw(i);
                       data[first + i] = as_number(value) < as_number(last) ? value : last;
                     }
                   });
  });
}

namespace {
// Box and Muller: two uniform numbers give two normal ones. 1 - u lies in (0, 1], so the logarithm is finite. Elements
// 2i and 2i + 1 of a chunk come from the same pair; the pairs are computed side by side, by the vector.
template <class T>
void normal_chunk(const uint32_t* words, int64_t pairs, double mean, double deviation, T* out) {
  constexpr DType kType = dtype_of<T>;
  static const vec::Loop log = vec::pointwise_loop(vec::ScalarOp::kLog, kType),
                         sqrt = vec::pointwise_loop(vec::ScalarOp::kSqrt, kType);
  static const vec::Loop cos = vec::pointwise_loop(vec::ScalarOp::kCos, kType),
                         sin = vec::pointwise_loop(vec::ScalarOp::kSin, kType);
  std::array<T, kChunkElems / 2> radius, angle, cosine;
  constexpr bool kWide = std::is_same_v<T, double>;
  for (int64_t i = 0; i < pairs; ++i) {
    radius[static_cast<size_t>(i)] = T{1} - static_cast<T>(unit(words, 2 * i, kWide));
    angle[static_cast<size_t>(i)] = 2 * std::numbers::pi_v<T> * static_cast<T>(unit(words, 2 * i + 1, kWide));
  }
  const auto run = [&](vec::Loop loop, const T* in, T* to) {
    const void* inputs[] = {in};
    loop(inputs, to, pairs, {});
  };
  run(log, radius.data(), radius.data());
  for (int64_t i = 0; i < pairs; ++i) radius[static_cast<size_t>(i)] *= T{-2};
  run(sqrt, radius.data(), radius.data());
  run(cos, angle.data(), cosine.data());
  run(sin, angle.data(), angle.data());
  for (int64_t i = 0; i < pairs; ++i) {
    const T scale = static_cast<T>(deviation) * radius[static_cast<size_t>(i)];
    out[2 * i] = static_cast<T>(mean) + scale * cosine[static_cast<size_t>(i)];
    out[2 * i + 1] = static_cast<T>(mean) + scale * angle[static_cast<size_t>(i)];
  }
}

}  // namespace

void normal(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<RandomAttrs>();
  const Tensor& out = args.out[0];
  visit_floating(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
    T* data = out.data<T>();
    for_each_chunk(args, args.in[0], words_per_element(out.dtype()),
                   [&](const uint32_t* words, int64_t skip, int64_t first, int64_t count) {
                     std::array<Compute, kChunkElems> drawn;
                     normal_chunk(words, (skip + count + 1) / 2, attrs.a, attrs.b, drawn.data());
                     for (int64_t i = 0; i < count; ++i) data[first + i] = T(drawn[static_cast<size_t>(skip + i)]);
                   });
  });
}

void randint(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<RandintAttrs>();
  const Tensor& out = args.out[0];
  const uint64_t range = static_cast<uint64_t>(attrs.high) - static_cast<uint64_t>(attrs.low);
  visit_dtype(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* data = out.data<T>();
    for_each_chunk(
        args, args.in[0], kWordsPerInteger, [&](const uint32_t* words, int64_t skip, int64_t first, int64_t count) {
          for (int64_t i = 0; i < count; ++i) {
            const auto value = static_cast<int64_t>(static_cast<uint64_t>(attrs.low) +
                                                    below(range, words[2 * (skip + i)], words[2 * (skip + i) + 1]));
            data[first + i] = Scalar(value).to<T>();
          }
        });
  });
}

// Fisher and Yates, from the back: element i changes places with one of those up to it.
void randperm(const KernelArgs& args) {
  const Tensor& out = args.out[0];
  const RandomStream stream = Stretch(args.in[0], out.sizes()).stream;
  const int64_t n = out.elems();
  std::vector<int64_t> order(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) order[static_cast<size_t>(i)] = i;
  for (int64_t i = n - 1; i > 0; --i) {
    const auto at = static_cast<uint64_t>(i) * kWordsPerInteger;
    const uint64_t other =
        below(static_cast<uint64_t>(i) + 1, base::random_word(stream, at), base::random_word(stream, at + 1));
    std::swap(order[static_cast<size_t>(i)], order[other]);
  }
  visit_dtype(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::transform(order.begin(), order.end(), out.data<T>(), [](int64_t value) { return Scalar(value).to<T>(); });
  });
}

void bernoulli(const KernelArgs& args) {
  const Tensor p = contiguous(args.in[0]);
  const Tensor& out = args.out[0];
  const auto probability = [](auto value) { return static_cast<double>(Scalar(static_cast<float>(value)).real()); };
  visit_floating(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* chances = p.data<T>();
    T* data = out.data<T>();
    const auto chance = [&](int64_t i) {
      if constexpr (std::is_same_v<T, double>) return chances[i];
      return probability(chances[i]);
    };
    for (int64_t i = 0; i < out.elems(); ++i) {
      CHORALE_CHECK(chance(i) >= 0 && chance(i) <= 1, "[bernoulli] probability ", chance(i), " at position ", i,
                    " is not between 0 and 1");
    }
    for_each_chunk(args, args.in[1], 1, [&](const uint32_t* words, int64_t skip, int64_t first, int64_t count) {
      for (int64_t i = 0; i < count; ++i)
        data[first + i] = narrow_to<T>(static_cast<double>(base::uniform_f32(words[skip + i])) < chance(first + i));
    });
  });
}

// Draws from weights that need not add up to 1. Without replacement: Efraimidis and Spirakis, the largest log(u) / w
// win.
void multinomial(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<DrawAttrs>();
  const Tensor weights = contiguous(args.in[0], DType::kF64);
  const Tensor& out = args.out[0];
  const RandomStream stream = Stretch(args.in[1], out.sizes()).stream;
  const int64_t n = weights.size(-1), rows = n > 0 ? weights.elems() / n : 0;
  const double* w = weights.data<double>();
  for (int64_t row = 0; row < rows; ++row) {
    double total = 0;
    int64_t positive = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double value = w[row * n + i];
      CHORALE_CHECK(value >= 0 && std::isfinite(value), "[multinomial] weight ", value, " of row ", row,
                    " at position ", i, " is negative or not finite");
      total += value;
      positive += value > 0;
    }
    CHORALE_CHECK(total > 0, "[multinomial] all weights of row ", row, " are zero");
    CHORALE_CHECK(attrs.replacement || positive >= attrs.count, "[multinomial] ", attrs.count,
                  " draws without replacement from ", positive, " weights that are not zero, in row ", row);
  }
  auto* drawn = out.data<int64_t>();
  parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> keys(static_cast<size_t>(n));
    std::vector<int64_t> order(static_cast<size_t>(n));
    for (int64_t row = begin; row < end; ++row) {
      const double* at = w + row * n;
      const auto word = [&](int64_t i) {
        const auto position = static_cast<uint64_t>(row * std::max(n, attrs.count) + i) * 2;
        return base::uniform_f64(base::random_word(stream, position), base::random_word(stream, position + 1));
      };
      if (attrs.replacement) {
        double sum = 0;
        for (int64_t i = 0; i < n; ++i) keys[static_cast<size_t>(i)] = sum += at[i];
        for (int64_t draw = 0; draw < attrs.count; ++draw) {
          const auto found = std::upper_bound(keys.begin(), keys.end(), word(draw) * sum);
          drawn[row * attrs.count + draw] = std::min<int64_t>(found - keys.begin(), n - 1);
        }
        continue;
      }
      for (int64_t i = 0; i < n; ++i) {
        keys[static_cast<size_t>(i)] = at[i] > 0 ? std::log(1 - word(i)) / at[i] : -INFINITY;
        order[static_cast<size_t>(i)] = i;
      }
      const auto larger = [&](int64_t a, int64_t b) {
        return keys[static_cast<size_t>(a)] > keys[static_cast<size_t>(b)] ||
               (keys[static_cast<size_t>(a)] == keys[static_cast<size_t>(b)] && a < b);
      };
      std::partial_sort(order.begin(), order.begin() + attrs.count, order.end(), larger);
      std::copy(order.begin(), order.begin() + attrs.count, drawn + row * attrs.count);
    }
  });
}

}  // namespace chorale::kernel::cpu
