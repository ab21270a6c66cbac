// `chorale mesh`: a mesh, drawn before there is a job, or as the ranks of one have it.
#include <fmt/format.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "chorale/app/commands.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/comm/mesh_drawing.h"
#include "chorale/comm/objects.h"
#include "chorale/comm/world.h"
#include "chorale/transport/host_identity.h"

namespace chorale::app {
namespace {

struct MeshArguments {
  std::string shape;
  std::vector<std::string> names;
  int nodes = 1;
};

std::vector<int> sizes_of(const std::string& shape) {
  std::vector<int> sizes;
  std::istringstream words(shape);
  for (std::string word; std::getline(words, word, 'x');) {
    const bool number = !word.empty() && word.size() < 7 && word.find_first_not_of("0123456789") == std::string::npos;
    CHORALE_CHECK(number && std::stoi(word) > 0, "[mesh] expected sizes such as 2x4, found '", shape, "'");
    sizes.push_back(std::stoi(word));
  }
  CHORALE_CHECK(!sizes.empty() && !shape.ends_with('x'), "[mesh] expected sizes such as 2x4, found '", shape, "'");
  return sizes;
}

// The launcher deals ranks to nodes like this: equally many to each, one node behind the other.
std::vector<std::string> planned_hosts(const std::vector<int>& sizes, int nodes) {
  int64_t ranks = 1;
  for (const int n : sizes) {
    ranks *= n;
    CHORALE_CHECK(ranks <= 1'000'000, "[mesh] more than a million ranks cannot be drawn");
  }
  CHORALE_CHECK(ranks % nodes == 0, "[mesh] ", ranks, " ranks cannot be dealt to ", nodes, " nodes equally");
  std::vector<std::string> hosts;
  hosts.reserve(static_cast<size_t>(ranks));
  for (int64_t rank = 0; rank < ranks; ++rank) hosts.push_back(fmt::format("node {}", rank / (ranks / nodes)));
  return hosts;
}

// Rank 0 prints.
void draw_job(const MeshArguments& arguments, const std::vector<int>& sizes) {
  comm::World world;
  world.init();
  std::vector<std::string> hosts;
  for (const comm::Value& host : comm::gather_object(world.group(), comm::Value(transport::host_name())))
    hosts.push_back(host.as<std::string>());
  if (world.group().rank() == 0) fmt::print("{}", comm::draw_mesh(sizes, arguments.names, hosts));
}

}  // namespace

void add_mesh(CLI::App& program, Work& work) {
  CLI::App* command = program.add_subcommand("mesh", "Draw a mesh of ranks with its hosts and groups: mesh 2x4");
  const auto arguments = std::make_shared<MeshArguments>();
  command->add_option("shape", arguments->shape, "ranks along each dimension, such as 2x4")->required();
  command->add_option("--names", arguments->names, "of the dimensions: dp,tp")->delimiter(',');
  command->add_option("--nodes", arguments->nodes, "that ranks are dealt to; in a job (chorale run) they are its own")
      ->check(CLI::Range(1, 65536));
  command->callback([arguments, &work] {
    work = [arguments] {
      const std::vector<int> sizes = sizes_of(arguments->shape);
      if (config::one_of_several_ranks()) return draw_job(*arguments, sizes);
      fmt::print("{}", comm::draw_mesh(sizes, arguments->names, planned_hosts(sizes, arguments->nodes)));
    };
  });
}

}  // namespace chorale::app
