// Tables of options (train/option_table.h) on the command line.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "chorale/launch/launcher.h"
#include "chorale/train/option_table.h"

namespace chorale::app {

// Adds the rows of a table, which must outlive the command. `note` gets the words that were given for an option.
using Note = std::function<void(const std::string& name, const std::vector<std::string>& words)>;
void add_options(CLI::App& command, const train::OptionTable& table, const Note& note);
// The same, but values are set, and what is wrong with them is said, as soon as they are read.
void add_options(CLI::App& command, const train::OptionTable& table);

// What the launcher lets users choose: the same for `run` and for `train`.
struct LaunchValues {
  int64_t nodes = 1, node_rank = 0, max_restarts = 0;
  double grace_s = 10;
  std::string rendezvous{}, log_dir{}, chaos{}, fabric{}, elastic{}, join{};
  bool checksum = false;
};
void list_options(LaunchValues& values, train::OptionTable& table);
// InvalidArgument when they cannot be together.
launch::LaunchOptions launch_options(const LaunchValues& values, int64_t ranks);

// Accepts a number in this range; for options outside of a table.
CLI::Validator between(double least, double most);

}  // namespace chorale::app
