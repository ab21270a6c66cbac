#include "chorale/app/program.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <iostream>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "chorale/app/commands.h"
#include "chorale/base/did_you_mean.h"
#include "chorale/base/error.h"
#include "chorale/base/printable.h"

namespace chorale::app {
namespace {

// The innermost command: gpt where the user wrote `chorale train gpt …`.
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
  const std::string nearest = did_you_mean(name, names);
  // What a user wanted to give to PROGRAM stands behind it.
  const bool is_programs = nearest.empty() && command.get_prefix_command();
  return concat("there is no option ", name, nearest,
                is_programs ? "; those of the program come after its name: run -n 2 PROGRAM " + name : "");
}

std::string explain(const CLI::App& program, const CLI::ParseError& error) {
  const CLI::App& command = chosen(program);
  const std::vector<std::string> words = command.remaining();
  if (command.get_require_subcommand_min() > 0) {  // and none was chosen
    return unknown_command(command, words.empty() ? "" : words.front());
  }
  // An option that is not known comes before one that is missing: it may be the same, misspelt.
  const bool is_missing =
      dynamic_cast<const CLI::RequiredError*>(&error) && !command.get_allow_extras() &&
      std::any_of(words.begin(), words.end(), [](const auto& word) { return word.starts_with('-'); });
  const bool has_extras = dynamic_cast<const CLI::ExtrasError*>(&error) && !words.empty();
  return has_extras || is_missing ? unknown_words(command) : error.what();
}

}  // namespace

std::string_view version() { return CHORALE_VERSION; }

namespace {

// What went wrong, in words, whatever was thrown.
std::string describe(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::bad_alloc&) {
    return "out of memory: the machine, or a limit (ulimit -v), has none left; choose something smaller";
  } catch (const std::filesystem::filesystem_error& error) {
    return error.what();
  } catch (const std::system_error& error) {  // of threads and the like
    if (error.code() != std::errc::resource_unavailable_try_again) return error.what();
    return concat("a thread could not be started: ", error.what(),
                  "; a limit on processes is reached (ulimit -u, or pids.max of a container). Raise it, end other "
                  "programs, or choose fewer ranks (-n) and --threads");
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "something was thrown that is no error; please report this";
  }
}

// Whether standard output took all of it; says so once if not.
bool output_is_whole() {
  errno = 0;
  std::cout.flush();
  const bool flushed = std::fflush(stdout) == 0;
  if (flushed && std::ferror(stdout) == 0 && std::cout.good()) return true;
  std::cerr << "chorale: the output could not be written" << (errno != 0 ? concat(": ", std::strerror(errno)) : "")
            << '\n';
  std::clearerr(stdout);
  std::cout.clear();
  return false;
}

// Reads the command line into work; returns the status of one that is wrong, or 0.
int plan_work(int argc, const char* const* argv, std::span<const AddCommand> commands, Work& work) {
  CLI::App program("Chorale trains neural networks in C++.", "chorale");
  program.set_version_flag("--version", "chorale " + std::string(version()));
  program.set_help_all_flag("--help-all", "Print the help of every command and exit");
  program.require_subcommand(0, 1);
  for (const AddCommand add : commands) add(program, work);

  const auto is_first_word = [&](const CLI::App* command) { return command->check_name(argv[1]); };
  if (argc > 1 && argv[1][0] != '-' && program.get_subcommands(is_first_word).empty()) {
    std::cerr << "chorale: " << printable(unknown_command(program, argv[1])) << '\n';
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
    std::cerr << name << ": " << printable(explain(program, error)) << "\nSee " << name << " --help\n";
    return 2;
  }
}

// The one place where errors of commands end.
int status_of(const std::function<int()>& body) {
  int status = 1;
  try {
    status = body();
  } catch (const CLI::RuntimeError& error) {
    status = error.get_exit_code();
  } catch (...) {
    const std::string problem = printable(describe(std::current_exception()));
    if (std::ferror(stdout) != 0) {  // it could not print
      std::clearerr(stdout);
      std::cerr << concat("chorale: the output could not be written: ", problem, "\n") << std::flush;
      return kOutputLost;
    }
    // Written in one piece, since a launcher that ends its ranks because of another one may come in between.
    std::cerr << concat("chorale: ", problem, "\n") << std::flush;
  }
  return output_is_whole() || status != 0 ? status : kOutputLost;
}

}  // namespace

int plan(int argc, const char* const* argv, std::span<const AddCommand> commands) {
  return status_of([&] {
    Work work;
    return plan_work(argc, argv, commands, work);
  });
}

int run(int argc, const char* const* argv, std::span<const AddCommand> commands) {
  return status_of([&] {
    Work work;
    if (const int status = plan_work(argc, argv, commands, work); status != 0) return status;
    if (work) work();
    return 0;
  });
}

}  // namespace chorale::app
