// Where each value of a graph lies while it runs: a static plan of memory.
//
// Note [Places] A value is a view of a root: an input, or what a node made. Roots that live at different times share
// bytes of one arena. A root that is an output lies in memory of its own; one that an input is overwritten with lies in
// the input's memory from the start where nothing reads the input's old value later.
#pragma once

#include <vector>

#include "chorale/graph/ir.h"

namespace chorale::graph {

struct Plan {
  enum class In : uint8_t { kNowhere, kArena, kInput, kOutput };
  struct Place {
    In in = In::kNowhere;
    uint32_t index = 0;  // of the input or output
    int64_t offset = 0;  // bytes from the start of the arena, or of element 0 of the input or output
  };
  std::vector<Place> places;      // by value
  std::vector<bool> is_view;      // by node: nothing to run
  std::vector<bool> writes_over;  // by node: a write whose result lies where in[0] lies
  std::vector<bool> copied;       // by output: a copy at the end
  std::vector<int64_t> rooms;     // by node: where in the arena its room is (graph/stripes.h); kNoRoom: it has none
  static constexpr int64_t kNoRoom = -1;
  int64_t arena_bytes = 0;
  int64_t output_bytes = 0;
  // Bytes at the end of the longest-lived moment: the arena's highest use, and what the values would take if each had
  // memory of its own.
  int64_t sum_bytes = 0;
};

// `with_rooms`: for a program that runs fused nodes in stripes.
Plan plan_memory(const Graph& graph, bool with_rooms = false);

}  // namespace chorale::graph
