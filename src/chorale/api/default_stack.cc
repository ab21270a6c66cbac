// Joins the layers: what a call of an op goes through on a thread that said nothing else.
#include "chorale/autograd/record.h"
#include "chorale/eager/run.h"
#include "chorale/op/builder.h"
#include "chorale/sharding/builder.h"
#include "chorale/vec/target.h"

namespace chorale::op {

const Stack& default_stack() {
  // On a processor without any of our instruction sets this throws, where a kernel would crash.
  static const char* const vectors = vec::target_name();
  static_cast<void>(vectors);
  static eager::Eager eager;
  static sharding::Sharding sharding;
  static const Stack below{&sharding, &eager};
  static autograd::Autograd recording(below);
  static const Stack stack{&recording, &sharding, &eager};
  return stack;
}

}  // namespace chorale::op
