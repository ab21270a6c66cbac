// Batches of a source that can only be read from its beginning: a log, a generator of examples, files too large for an
// index. A stream is any type with
//
//   void rewind(int64_t epoch);           // to the first example of that epoch
//   std::optional<Example> next();        // nothing at the end
//
// One thread at a time reads it, in order; workers share what comes after: a function of the example (decoding,
// augmentation), and `collate`.
#pragma once

#include "chorale/data/loader.h"

namespace chorale::data {

template <class S>
concept Stream = requires(S& stream, int64_t epoch) {
  stream.rewind(epoch);
  { stream.next().has_value() } -> std::convertible_to<bool>;
};

template <Stream S, class F>
auto transform_example(const F& transform, typename decltype(std::declval<S&>().next())::value_type example,
                       Generator& rng) {
  if constexpr (std::invocable<const F&, decltype(example), Generator&>) {
    return transform(std::move(example), rng);
  } else {
    return std::decay_t<decltype(transform(std::move(example)))>(transform(std::move(example)));
  }
}

// A loader (see loader.h) of a stream. A loop that is continued reads the beginning of the epoch again and drops it.
// Options that need an index, such as shuffle, are errors.
template <Stream S, class F = std::identity>
class StreamLoader : public LoaderBase<decltype(collate(
                         std::vector<decltype(transform_example<S, F>(
                             std::declval<const F&>(), *std::declval<S&>().next(), std::declval<Generator&>()))>()))> {
  using Raw = typename decltype(std::declval<S&>().next())::value_type;
  using Example =
      decltype(transform_example<S, F>(std::declval<const F&>(), std::declval<Raw>(), std::declval<Generator&>()));
  using Batch = decltype(collate(std::vector<Example>()));

 public:
  explicit StreamLoader(S stream, const LoaderOptions& options = {}, F transform = {})
      : LoaderBase<Batch>([shared = std::make_shared<Shared>(std::move(stream), std::move(transform)), options](
                              int64_t epoch, int64_t first) { return claims(shared, options, epoch, first); },
                          options, -1) {
    CHORALE_CHECK(!options.shuffle, "[StreamLoader] a stream has no index and cannot be shuffled");
    CHORALE_CHECK(options.batch_size > 0, "[StreamLoader] a batch needs at least one example, not ",
                  options.batch_size);
  }

 private:
  struct Shared {
    Shared(S s, F f) : stream(std::move(s)), transform(std::move(f)) {}
    S stream;
    const F transform;
  };

  static Pipeline::Claim claims(const std::shared_ptr<Shared>& shared, const LoaderOptions& options, int64_t epoch,
                                int64_t first) {
    shared->stream.rewind(epoch);
    int64_t index = 0;
    while (index < first * options.batch_size && shared->stream.next().has_value()) ++index;
    return [=]() mutable -> Pipeline::Job {
      auto raw = std::make_shared<std::vector<Raw>>();
      const int64_t begin = index;
      while (static_cast<int64_t>(raw->size()) < options.batch_size) {
        auto example = read(*shared, index);
        if (!example) break;
        raw->push_back(std::move(*example));
        ++index;
      }
      const bool whole = static_cast<int64_t>(raw->size()) == options.batch_size;
      if (raw->empty() || (options.drop_last && !whole)) return {};
      return [=, seed = options.seed] { return std::make_shared<Batch>(batch_of(*shared, *raw, begin, seed, epoch)); };
    };
  }
  static std::optional<Raw> read(Shared& shared, int64_t index) {
    try {
      return shared.stream.next();
    } catch (...) {
      throw_sample_error(index);
    }
  }
  static Batch batch_of(const Shared& shared, std::vector<Raw>& raw, int64_t index, uint64_t seed, int64_t epoch) {
    std::vector<Example> examples;
    examples.reserve(raw.size());
    for (Raw& example : raw) {
      Generator rng = sample_generator(seed, epoch, index);
      try {
        examples.push_back(transform_example<S>(shared.transform, std::move(example), rng));
      } catch (...) {
        throw_sample_error(index);
      }
      ++index;
    }
    return collate(examples);
  }
};

}  // namespace chorale::data
