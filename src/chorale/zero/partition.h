// Which rank keeps the optimizer's state of which parameter.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace chorale::zero {

// Gives each of a group's parameters, by their numbers of elements, an owner: large ones first (equal ones in their
// order), each to the rank that has least so far, the lowest where several have. `totals` are the elements of each
// rank; they go on from group to group. A function of sizes only: every rank comes to the same answer.
std::vector<int> owners_of(std::span<const int64_t> elems, std::vector<int64_t>& totals);

}  // namespace chorale::zero
