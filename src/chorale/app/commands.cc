#include "chorale/app/commands.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "chorale/base/error.h"

namespace chorale::app {
namespace {

// Becomes the program chorale-COMMAND, which lies beside this one and knows the command.
[[noreturn]] void become(const std::string& command, const std::vector<std::string>& words) {
  const std::string name = "chorale-" + command;
  const std::string path = std::filesystem::read_symlink("/proc/self/exe").parent_path() / name;
  std::vector<std::string> all{name, command};
  all.insert(all.end(), words.begin(), words.end());
  std::vector<char*> arguments;
  arguments.reserve(all.size() + 1);
  for (std::string& word : all) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  execv(path.c_str(), arguments.data());
  throw StateError(concat("'", command, "' is a program of its own, and ", path,
                          " cannot be started: ", std::strerror(errno), ". In a checkout, `./chorale ", command,
                          "` builds it; `cmake --install` installs it with the rest"));
}

// The command's words, its help included, are for the other program.
void add_program(CLI::App& program, Work& work, const std::string& command, const std::string& description) {
  CLI::App* other = program.add_subcommand(command, description);
  other->prefix_command();
  other->set_help_flag();
  other->set_help_all_flag();
  other->callback(
      [&work, other, command] { work = [command, words = other->remaining()] { become(command, words); }; });
}

void add_bench_program(CLI::App& program, Work& work) {
  add_program(program, work, "bench", "Measure, beside peers in the same run (a program of its own: chorale-bench)");
}

}  // namespace

std::span<const AddCommand> chorale_commands() {
#define CHORALE_ADDRESS(name) add_##name,
  static constexpr AddCommand kCommands[] = {add_bench_program, CHORALE_COMMANDS(CHORALE_ADDRESS)};
#undef CHORALE_ADDRESS
  return kCommands;
}

}  // namespace chorale::app
