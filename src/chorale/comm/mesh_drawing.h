// A mesh for people: which rank stands where, on which host, and which ranks talk to each other.
#pragma once

#include <string>
#include <vector>

namespace chorale::comm {

// A drawing of ranks 0, 1, … in row-major order; `hosts` has the name of each rank's host. Names of dimensions may be
// left out. InvalidArgument for what Mesh would refuse.
//
//   mesh of 2 x 2 ranks (dp, tp) on 2 hosts
//
//            tp 0   tp 1
//     dp 0      0      1   host a
//     dp 1      2      3   host b
//
//   dp   2 groups of 2, between hosts: {0, 2} {1, 3}
//   tp   2 groups of 2, inside a host: {0, 1} {2, 3}
std::string draw_mesh(const std::vector<int>& shape, const std::vector<std::string>& names,
                      const std::vector<std::string>& hosts);

}  // namespace chorale::comm
