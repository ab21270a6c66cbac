// Contexts of distributed autograd in tests: what is recorded in one, as text, and questions to other workers.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "chorale/api/api.h"
#include "chorale/dist_autograd/context.h"
#include "chorale/rpc/agents_test_util.h"

namespace chorale::rpc {

// The send nodes of a context and what they lead to, in the order of hops: "send[add[receive,receive]]"; then the
// number of receive nodes. Different receive nodes have different numbers.
struct Recorded {
  std::vector<std::string> sends;
  int64_t receives = 0;
  std::vector<int> known;
  CHORALE_MESSAGE(Recorded, sends, receives, known)
};
Recorded recorded(const dist_autograd::Contexts& contexts, uint64_t context);

// Served functions. What the worker has recorded in the caller's context,
Recorded recorded_here();
// whether it knows a context,
bool knows_context(uint64_t context);
// and the gradients it has in one: by the values of the leaf.
std::vector<std::pair<Tensor, Tensor>> gradients_here(uint64_t context);

const std::vector<Served>& context_functions();

// t as a leaf that requires a gradient.
Tensor wanting(const Tensor& t);
// Each element depends on its place.
Tensor pattern(const Shape& sizes, double seed);
// The sparse twin of the catalogue: 3.2 at (0, 2), 4.1 at (1, 0), 5.3 at (1, 2).
Tensor sparse_example();

}  // namespace chorale::rpc
