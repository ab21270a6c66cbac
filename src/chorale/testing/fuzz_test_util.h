// Fuzzing: a reader of files or messages gets hostile bytes, and answers with a result or an InvalidArgument, never
// with anything else.
//
//   // json/json_fuzz_test.cc
//   CHORALE_FUZZ(Json, {"{}", "[1, 2]"}) { json::parse("input", input); }
//
// One such file becomes two programs. Among the tests of its layer it replays the seeds, what is left when their ends
// are cut off, and a few thousand mutations, the same ones each time. `tools/fuzz` builds it alone, with clang's
// libFuzzer and the sanitizers, and runs it for as long as one likes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace chorale::fuzz {

struct Target {
  void (*run)(std::string_view input);
  std::vector<std::string> (*seeds)();  // well-formed: `run` accepts them
};

// Runs one input: InvalidArgument is an answer, any other exception gets out.
void run(const Target& target, std::string_view input);
// What went wrong on a seed or on one of `mutations` mutations, with the input; empty when nothing did.
std::string replay(const Target& target, int mutations = 3000);
// Writes each seed as a file: where libFuzzer starts from.
void write_seeds(const Target& target, const std::string& folder);

// The bytes of numbers, for seeds of binary formats.
template <class... Numbers>
std::string bytes_of(Numbers... numbers) {
  std::string result;
  (result.append(reinterpret_cast<const char*>(&numbers), sizeof numbers), ...);
  return result;
}

}  // namespace chorale::fuzz

#ifdef CHORALE_LIBFUZZER
#define CHORALE_FUZZ_ENTRY(Name)                                                                           \
  extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {                                           \
    if (*argc > 1) ::chorale::fuzz::write_seeds(fuzz_target_##Name, (*argv)[1]);                           \
    return 0;                                                                                              \
  }                                                                                                        \
  extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {                                \
    ::chorale::fuzz::run(fuzz_target_##Name, std::string_view(reinterpret_cast<const char*>(data), size)); \
    return 0;                                                                                              \
  }
#else
#include <gtest/gtest.h>
#define CHORALE_FUZZ_ENTRY(Name)                                \
  TEST(Name##Fuzz, AnswersHostileInputWithAResultOrAnError) {   \
    EXPECT_EQ(::chorale::fuzz::replay(fuzz_target_##Name), ""); \
  }
#endif

// CHORALE_FUZZ(Name, seeds) { … input … }, once per file; the seeds are a braced list of strings or a call that makes
// one.
#define CHORALE_FUZZ(Name, ...)                                                                                \
  static void fuzz_run_##Name(std::string_view input);                                                         \
  static std::vector<std::string> fuzz_seeds_##Name() { return __VA_ARGS__; }                                  \
  static const ::chorale::fuzz::Target fuzz_target_##Name{.run = fuzz_run_##Name, .seeds = fuzz_seeds_##Name}; \
  CHORALE_FUZZ_ENTRY(Name)                                                                                     \
  static void fuzz_run_##Name([[maybe_unused]] std::string_view input)
