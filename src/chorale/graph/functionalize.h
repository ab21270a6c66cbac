// Makes a Graph of a Recording: writes in place become values, and what was written to storages from outside is written
// back at the end.
//
// Note [Bases] Every storage has a base, a value that shows all of it that matters. A tensor is a view of its storage's
// base: the base itself, what a recorded view op made of it, or as_strided of it once the base has changed. A write
// through a tensor makes a new base. The base of a storage from outside is the tensor that was seen on it, or, where
// several different ones were seen and one is written, the stretch of memory that holds all of them.
#pragma once

#include <vector>

#include "chorale/graph/ir.h"

namespace chorale::graph {

struct Functional {
  struct Input {
    uint32_t storage = 0;  // in the recording
    Layout layout;
    uint32_t tensor = kNone;  // the recorded tensor it is; none where it is a stretch that holds several
  };
  struct Result {
    uint32_t storage = 0;
    uint32_t tensor = kNone;  // the recorded tensor that shows all of it
  };
  Graph graph;
  std::vector<Input> inputs;    // by input of the graph
  std::vector<Result> outputs;  // by output
  std::vector<Generator*> generators;
};

// Outputs: what the storages `live` hold at the end (storages without bytes, or made here), then the tensors `wanted`,
// then what is written back to storages from outside. Inputs come in the order in which calls first read them; tensors
// that `wanted` or tangents need are inputs too.
Functional functionalize(const Recording& recording, const std::vector<uint32_t>& live,
                         const std::vector<uint32_t>& wanted = {});

}  // namespace chorale::graph
