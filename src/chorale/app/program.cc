#include "chorale/app/program.h"

#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "chorale/app/commands.h"
#include "chorale/base/did_you_mean.h"
#include "chorale/base/error.h"

namespace chorale::app {
namespace {

// Of `chorale train gpt …`, the command gpt.
const CLI::App& chosen(const CLI::App& program) {
  const CLI::App* command = &program;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  return *command;
}
std::string full_name(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent ? full_name(*parent) + " " + command.get_name() : command.get_name();
}

// A word that is no command of `parent`, or no word where there should be one.
std::string unknown_command(const CLI::App& parent, const std::string& word) {
  std::vector<std::string> names;
  std::string list;
  for (const CLI::App* command : parent.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_group().empty()) continue;  // hidden
    names.push_back(command->get_name());
    list += (list.empty() ? "" : ", ") + names.back();
  }
  if (word.empty()) return concat("which one? (commands: ", list, ")");
  return concat("no command '", word, "'", did_you_mean(word, names), " (commands: ", list, ")");
}

std::string unknown_words(const CLI::App& command) {
  const std::vector<std::string> words = command.remaining();
  const auto option = std::find_if(words.begin(), words.end(), [](const auto& word) { return word.starts_with('-'); });
  if (option == words.end()) return concat("'", words.front(), "' was not expected");
  const std::string name = option->substr(0, option->find('='));
  std::vector<std::string> names;
  for (const CLI::Option* known : command.get_options()) {
    for (const std::string& long_name : known->get_lnames()) names.push_back("--" + long_name);
  }
  return concat("there is no option ", name, did_you_mean(name, names));
}

std::string explain(const CLI::App& program, const CLI::ParseError& error) {
  const CLI::App& command = chosen(program);
  const std::vector<std::string> words = command.remaining();
  if (command.get_require_subcommand_min() > 0) {  // and none was chosen
    return unknown_command(command, words.empty() ? "" : words.front());
  }
  const bool has_extras = dynamic_cast<const CLI::ExtrasError*>(&error) && !words.empty();
  return has_extras ? unknown_words(command) : error.what();
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
    if (error.get_exit_code() == 0) return program.exit(error);  // prints help or the version
    const std::string name = full_name(chosen(program));
    std::cerr << name << ": " << explain(program, error) << "\nSee " << name << " --help\n";
    return 2;
  } catch (const Error& error) {
    std::cerr << "chorale: " << error.what() << '\n';
    return 1;
  }
}

}  // namespace chorale::app
