// Random programs on small tensors of f32, with generated kernels: the bits of the ops, in blocks and without.
#include <gtest/gtest.h>

#include "chorale/api/random_programs_test_util.h"
#include "chorale/codegen/fused.h"
#include "chorale/testing/soak_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::codegen {
namespace {

using random_programs::Kind, random_programs::mistake, random_programs::Program, random_programs::random_program,
    random_programs::shrink, random_programs::text_of;

TEST(RandomFused, GivesWhatEagerGives) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path()});
  // Each program has kernels of its own, which take a second to compile.
  const auto seeds = static_cast<uint64_t>(seeds_to_try(3, 300));
  const CompileOptions options{.whole_graph = true, .backend = fused({.cache = &cache, .optimize = "-O1"})};
  const Kind kind{.dtype = DType::kF32, .columns = 9, .tolerance = 1e-6};
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    const Program program = random_program(1'000'010 + seed, true);
    ASSERT_EQ(mistake(program, options, kind), "") << "seed " << seed << ", the smallest program that differs:\n"
                                                   << text_of(shrink(program, options, kind));
  }
}

}  // namespace
}  // namespace chorale::codegen
