#include "chorale/app/program.h"

#include <algorithm>
#include <iostream>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "chorale/app/commands.h"
#include "chorale/base/error.h"

namespace chorale::app {
namespace {

// Insertions, deletions and replacements of a letter that turn a into b.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);  // distances from the part of a read so far to each prefix of b
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

std::string unknown_command(const CLI::App& program, const std::string& word) {
  std::string names;
  std::string nearest;
  size_t nearest_distance = std::max<size_t>(2, word.size() / 2) + 1;
  for (const CLI::App* command : program.get_subcommands([](const CLI::App*) { return true; })) {
    const std::string name = command->get_name();
    names += (names.empty() ? "" : ", ") + name;
    if (const size_t distance = edit_distance(word, name); distance < nearest_distance) {
      nearest = name;
      nearest_distance = distance;
    }
  }
  return concat("no command '", word, nearest.empty() ? "'" : "'; did you mean '" + nearest + "'?",
                " (commands: ", names, ")");
}

}  // namespace

std::string_view version() { return CHORALE_VERSION; }

int run(int argc, const char* const* argv) {
  CLI::App program("Chorale trains neural networks in C++.", "chorale");
  program.set_version_flag("--version", "chorale " + std::string(version()));
  program.set_help_all_flag("--help-all", "Print the help of every command and exit");
  program.require_subcommand(0, 1);
#define CHORALE_ADD(name) add_##name(program);
  CHORALE_COMMANDS(CHORALE_ADD)
#undef CHORALE_ADD

  const auto is_first_word = [&](const CLI::App* command) { return command->check_name(argv[1]); };
  if (argc > 1 && argv[1][0] != '-' && program.get_subcommands(is_first_word).empty()) {
    std::cerr << "chorale: " << unknown_command(program, argv[1]) << '\n';
    return 2;
  }
  try {
    program.parse(argc, argv);
    if (program.get_subcommands().empty()) std::cout << program.help();
    return 0;
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? 0 : 2;  // prints help, version or what is wrong
  } catch (const Error& error) {
    std::cerr << "chorale: " << error.what() << '\n';
    return 1;
  }
}

}  // namespace chorale::app
