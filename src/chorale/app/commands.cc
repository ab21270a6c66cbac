#include "chorale/app/commands.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "chorale/base/error.h"

namespace chorale::app {

void become(const std::string& own_name, const std::string& command, const std::vector<std::string>& words) {
  const std::string name = "chorale-" + own_name;
  const std::string path = std::filesystem::read_symlink("/proc/self/exe").parent_path() / name;
  std::vector<std::string> all{name};
  all.insert(all.end(), words.begin(), words.end());
  std::vector<char*> arguments;
  arguments.reserve(all.size() + 1);
  for (std::string& word : all) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  execv(path.c_str(), arguments.data());
  const int error = errno;
  throw StateError(concat("'", command, "' is a program of its own, and ", path,
                          " cannot be started: ", std::strerror(error), ". In a checkout, `./chorale ", command,
                          "` builds it; `cmake --install` installs it with the rest"));
}

namespace {

void add_bench_program(CLI::App& program, Work& work) {
  add_program(program, work, "bench", "Measure, beside peers in the same run (a program of its own: chorale-bench)",
              {"bench"});
}

void add_checkpoint_program(CLI::App& program, Work& work) {
  add_program(program, work, "checkpoint",
              "Look at checkpoints, and give them another form (a program of its own: chorale-checkpoint)",
              {"checkpoint"});
}

void add_graph_program(CLI::App& program, Work& work) {
  add_program(program, work, "graph", "Show compiled graphs as a page (a program of its own: chorale-graph)",
              {"graph"});
}

}  // namespace

void add_program(CLI::App& parent, Work& work, const std::string& name, const std::string& description,
                 const std::vector<std::string>& words) {
  CLI::App* other = parent.add_subcommand(name, description);
  other->prefix_command();
  other->set_help_flag();
  other->set_help_all_flag();
  other->callback([&work, other, name, words] {
    work = [name, all = words, more = other->remaining()]() mutable {
      all.insert(all.end(), more.begin(), more.end());
      become(name, name == all[0] ? name : all[0] + " " + name, all);
    };
  });
}

std::span<const AddCommand> chorale_commands() {
#define CHORALE_ADDRESS(name) add_##name,
  static constexpr AddCommand kCommands[] = {add_bench_program, add_checkpoint_program, add_graph_program,
                                             CHORALE_COMMANDS(CHORALE_ADDRESS)};
#undef CHORALE_ADDRESS
  return kCommands;
}

}  // namespace chorale::app
