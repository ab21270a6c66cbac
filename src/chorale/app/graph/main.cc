// chorale-graph, which `chorale graph …` becomes.
#include "chorale/app/graph/graph_page.h"
#include "chorale/app/program.h"
#include "chorale/base/descriptors.h"

int main(int argc, char** argv) {
  chorale::open_standard_descriptors();
  const chorale::app::AddCommand commands[] = {chorale::app::add_graph};
  return chorale::app::run(argc, argv, commands);
}
