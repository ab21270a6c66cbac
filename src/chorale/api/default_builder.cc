// Joins the layers: what a call of an op goes through on a thread that said nothing else.
#include "chorale/autograd/record.h"
#include "chorale/eager/run.h"
#include "chorale/op/builder.h"

namespace chorale::op {

Builder& default_builder() {
  static eager::Eager eager;
  static autograd::Autograd recording(eager);
  return recording;
}

}  // namespace chorale::op
