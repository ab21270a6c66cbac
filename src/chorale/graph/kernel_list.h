// What a program runs, for people.
#pragma once

#include <string>
#include <vector>

#include "chorale/graph/program.h"

namespace chorale::graph {

// "fused: mul, relu": a node with the rows in it.
std::string describe(const Node& node);

struct ListedKernel {
  size_t node = 0;
  std::string name;
  int64_t bytes = 0;        // read and written
  double microseconds = 0;  // expected
};
// Kernels in order, views left out. Expected is what memory of 10 GB/s and a core of 100 Gflop/s would need, whichever
// is more: an order of magnitude, and which of them are worth a look.
std::vector<ListedKernel> list_kernels(const Program& program);

}  // namespace chorale::graph
