// Chooses what a training step keeps from its first half for its second, and what it computes again there, so that less
// memory is needed at the moment when most is: a minimum cut through the values, each as wide as its bytes.
//
// What may be computed again follows from `memory_budget`. At 1 it is what costs no more than reading and writing its
// bytes; on a device, which waits for its memory all the time, nothing.
// At 0 it is everything but random numbers, collectives and writes, between places where a single value leads on (the
// end of a block); some of these are kept, as far apart as needs least memory. Between the two it is what costs least
// for each byte first, until the bytes that are kept have come so far down. Values are the same, bit for bit. What is
// computed again is computed right before it is needed.
#pragma once

#include <span>

#include "chorale/graph/ir.h"

namespace chorale::graph {

void recompute(Graph& graph, double memory_budget);

// The same where the halves become graphs of their own (pieces.h): by node before `turn`, with which the second half
// begins, whether that makes it again. Nodes may read what neither is an input nor made here: values of other graphs.
// Between the halves the caller may write to what it holds. So the second half reads no other outputs, and none of the
// inputs that are `overwritten` by the first, than it would read anyway; with a budget of 1 no other inputs at all.
std::vector<bool> choose_again(const Graph& graph, uint32_t turn, double memory_budget,
                               std::span<const uint32_t> overwritten);

}  // namespace chorale::graph
