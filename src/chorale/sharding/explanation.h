// What ops on sharded tensors do, for people: which placements were chosen, what is sent and what it costs.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "chorale/comm/comm_counter.h"
#include "chorale/sharding/decision.h"

namespace chorale {

// Runs `function` and says, op by op, how operands were placed, how they had to be for the rule that was chosen, how
// results are, what was sent for that, and what it costs in the model by which it is decided. One line per op on
// sharded tensors and per redistribution.
//
//   matmul([S(0)], [S(0)] to [R]) -> [S(0)]  sends 1 all_gather, 512 B; about 8 us
std::string explain_sharding(const std::function<void()>& function);
std::string explain_sharding(const std::function<void(const std::vector<Tensor>&)>& function,
                             const std::vector<Tensor>& inputs);

namespace sharding {

// Whether such a call is under way on this thread.
bool explains();
void explain_call(const op::OpDef& op, std::span<const Tensor> in, const Decision& decision,
                  const comm::CommCounter& sent);
void explain_move(const Tensor& x, const Placements& to, const comm::CommCounter& sent);

// What redistributing x costs, by the model.
double cost_of_move(const Tensor& x, const Placements& to);

// An op that cannot be split gathers its operands: said once for each op and each shapes and placements of them.
void warn_of_gathering(const op::OpDef& op, std::span<const Tensor> in, double cost);

}  // namespace sharding
}  // namespace chorale
