#include "chorale/app/program.h"

#include <iostream>
#include <string>
#include <vector>

#include "chorale/app/commands.h"
#include "chorale/base/did_you_mean.h"
#include "chorale/base/error.h"

namespace chorale::app {
namespace {

std::string unknown_command(const CLI::App& program, const std::string& word) {
  std::vector<std::string> names;
  std::string list;
  for (const CLI::App* command : program.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
    list += (list.empty() ? "" : ", ") + names.back();
  }
  return concat("no command '", word, "'", did_you_mean(word, names), " (commands: ", list, ")");
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
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();  // the command has said why
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? 0 : 2;  // prints help, version or what is wrong
  } catch (const Error& error) {
    std::cerr << "chorale: " << error.what() << '\n';
    return 1;
  }
}

}  // namespace chorale::app
