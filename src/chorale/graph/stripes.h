// Runs a few nodes a stripe of lines at a time, so that what they hand to each other stays in the cache, and so that
// what nobody else reads is never there as a whole: the logits of a large vocabulary, what a sum is made of.
//
// Note [Stripes] The values of such a body are seen as `lines` lines of equal length, one behind the other. A node
// either works line by line, or adds up over lines (the sum over all dimensions but the last, a product that contracts
// lines): then each stripe gives a part, and parts are added in the order of lines. The height of a stripe follows from
// sizes alone, so results do not depend on the number of threads.
#pragma once

#include <optional>
#include <vector>

#include "chorale/graph/program.h"

namespace chorale::graph {

// How the values of a body are cut.
struct Stripes {
  enum class Role : uint8_t {
    kUnknown,
    kWhole,   // read as a whole by every stripe
    kLines,   // a stripe holds some of its lines
    kTurned,  // lines that are read as columns, by a product that contracts them
    kTotal,   // added up over stripes: known at the end
  };
  std::vector<Role> roles;  // by value
  int64_t lines = 0;
  int64_t line_bytes = 0;  // of everything that is cut, together
  bool has_product = false;
};

// None where a node of the body cannot be cut into that many lines, or where one reads a total.
std::optional<Stripes> cut_into_stripes(const Graph& body, int64_t lines);
// Lines in one stripe.
int64_t stripe_height(const Stripes& stripes);

// Whether a fused node works element by element: all rows in it do.
bool is_elementwise(const Node& fused);

// Whether a result of a fused node may lie over an operand of the same kind: it works element by element, or the
// operand is logits that only their loss and its gradient read, line by line (kernel/cpu/support/along_dim.h).
bool may_lie_over(const Node& fused, size_t operand);

// Room that a fused node which runs in stripes needs while it runs, for what is there only in stripes; 0 for others.
int64_t stripe_room_bytes(const Node& node);

// What runs a fused node in stripes. `fused` finds kernels of fused nodes inside of it. Behind the node's results it is
// given the room, if it needs any: bytes that belong to nobody else while it runs.
FusedKernel striped_kernel(const Node& node, const FusedKernels& fused);

}  // namespace chorale::graph
