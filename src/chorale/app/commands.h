// The commands of the chorale program. A new one is a line here and a file that defines its add_… function. A command
// that training does not need, and that takes long to build, is a program of its own: a folder with its sources and a
// main.cc here, and a line in commands.cc (docs/dev/design.md, section 1).
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "chorale/launch/launcher.h"

#define CHORALE_COMMANDS(X) X(doctor) X(flight) X(generate) X(mesh) X(ops) X(report) X(resize) X(run) X(train) X(watch)

namespace chorale::app {

// Exit statuses besides 0, 1 (the command failed) and 2 (the command line is wrong).
constexpr int kNotFinite = 3;  // training stopped, since a number was not finite
using launch::kOutputLost;     // the work is done, but what it printed could not be written

// What a command does, once its options are known to be right.
using Work = std::function<void()>;

// add_doctor(program, work) and so on: each adds its subcommand with its options, and a callback that checks them and
// leaves the work. The work throws any exception to fail, whose message the program prints, or
// CLI::RuntimeError(status) to end with a status of its own.
#define CHORALE_DECLARE(name) void add_##name(CLI::App& program, Work& work);
CHORALE_COMMANDS(CHORALE_DECLARE)
#undef CHORALE_DECLARE

// The only command of chorale-checkpoint, and that of chorale-bench.
void add_checkpoint(CLI::App& program, Work& work);
void add_bench(CLI::App& program, Work& work);
void add_bench_all(CLI::App& bench, Work& work);
void add_bench_collectives(CLI::App& bench, Work& work);
void add_bench_ops(CLI::App& bench, Work& work);
void add_bench_steps(CLI::App& bench, Work& work);
void add_bench_ddp(CLI::App& bench, Work& work);
void add_bench_sharded(CLI::App& bench, Work& work);
void add_bench_rpc(CLI::App& bench, Work& work);

// The command of chorale-recommender.
inline constexpr const char* kRecommenderHelp =
    "Which user likes which item, on made data: a table of items on a server, data-parallel layers on trainers";
void add_train_recommender(CLI::App& program, Work& work);
// Becomes the program chorale-NAME beside this one, which knows the command of these words; `command` is for the
// message that it is not there.
[[noreturn]] void become(const std::string& name, const std::string& command, const std::vector<std::string>& words);
// A command whose words, its help included, are for the program chorale-NAME beside this one. `words` come before them.
void add_program(CLI::App& parent, Work& work, const std::string& name, const std::string& description,
                 const std::vector<std::string>& words);

// Ends the program with this status, for work that has one of its own.
inline void end_with(int status) {
  if (status != 0) throw CLI::RuntimeError(status);
}

using AddCommand = void (*)(CLI::App& program, Work& work);
// Those of `chorale`: the list above, and each command that is a program of its own, which this one then becomes.
std::span<const AddCommand> chorale_commands();

}  // namespace chorale::app
