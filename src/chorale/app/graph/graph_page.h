// A page of compiled graphs: one file, with nothing in it that asks a server.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "chorale/app/commands.h"
#include "chorale/graph/program.h"

namespace chorale::app {

struct KernelSource {
  std::string name, text;
};
struct ShownGraph {
  std::string name;
  std::shared_ptr<const graph::Program> program;
  std::vector<KernelSource> sources;  // of generated kernels
  std::vector<double> microseconds;   // by kernel; empty: not measured
};

// The only command of chorale-graph.
void add_graph(CLI::App& program, Work& work);

std::string graph_page(const std::vector<ShownGraph>& graphs);

}  // namespace chorale::app
