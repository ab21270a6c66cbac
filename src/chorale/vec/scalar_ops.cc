#include "chorale/vec/scalar_ops.h"

namespace chorale::vec {
namespace {

using namespace domain;

// "(a, b)" has one comma more than none.
constexpr int count_inputs(const char* inputs) {
  int count = 1;
  for (; *inputs != '\0'; ++inputs) count += *inputs == ',' ? 1 : 0;
  return count;
}

constexpr ScalarInfo kInfo[] = {
#define CHORALE_INFO(Name, dtypes, inputs, kind, ...) \
  {#Name, #inputs, #__VA_ARGS__, count_inputs(#inputs), ScalarKind::kind, static_cast<uint8_t>(dtypes)},
#define CHORALE_SCALAR(Name, dtypes, inputs, ...) CHORALE_INFO(Name, dtypes, inputs, kSame, __VA_ARGS__)
#define CHORALE_PREDICATE(Name, dtypes, inputs, ...) CHORALE_INFO(Name, dtypes, inputs, kPredicate, __VA_ARGS__)
#define CHORALE_MASKED(Name, dtypes, inputs, ...) CHORALE_INFO(Name, dtypes, inputs, kMasked, __VA_ARGS__)
#define CHORALE_TO_REAL(Name, dtypes, inputs, ...) CHORALE_INFO(Name, dtypes, inputs, kToReal, __VA_ARGS__)
#define CHORALE_SCALAR_ALL
#include "chorale/vec/scalar_ops.inc"
#undef CHORALE_SCALAR_ALL
#undef CHORALE_INFO
};

}  // namespace

const ScalarInfo& info(ScalarOp op) { return kInfo[static_cast<size_t>(op)]; }

}  // namespace chorale::vec
