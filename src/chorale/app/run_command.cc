// `chorale run`: starts a program as the ranks of a job.
#include <memory>
#include <string>

#include "chorale/app/commands.h"
#include "chorale/app/options.h"
#include "chorale/base/error.h"
#include "chorale/launch/guardian.h"
#include "chorale/train/options.h"

namespace chorale::app {
namespace {

struct RunArguments {
  LaunchValues values;
  int64_t ranks = 0;
  int guardian = -1;
  train::OptionTable table;
};

launch::LaunchOptions options_of(const RunArguments& arguments, std::vector<std::string> words) {
  // Everything after the program is the program's; an option before it that we do not know ends up here.
  if (!words.empty() && words.front().starts_with('-')) throw CLI::ExtrasError({words.front()});
  if (words.empty()) throw CLI::RequiredError("PROGRAM");
  if (arguments.ranks == 0) throw CLI::RequiredError("-n");
  try {
    launch::LaunchOptions options = launch_options(arguments.values, arguments.ranks);
    options.command = std::move(words);
    return options;
  } catch (const InvalidArgument& error) {
    throw CLI::ValidationError(error.what());
  }
}

}  // namespace

void add_run(CLI::App& program, Work& work) {
  CLI::App* command = program.add_subcommand("run", "Start a program as the ranks of a job: run -n 4 PROGRAM ARGS...");
  command->prefix_command();
  command->footer(
      "PROGRAM gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, ...). The exit status is 0 when every rank "
      "ended\n"
      "with 0, else that of the first rank that failed (128 + N: killed by signal N).");
  const auto arguments = std::make_shared<RunArguments>();
  arguments->table.add({.name = "nproc-per-node",
                        .help = "ranks on this node",
                        .target = &arguments->ranks,
                        .kind = train::OptionKind::kHere,
                        .least = 1,
                        .most = train::kMostRanks,
                        .value_name = "N",
                        .also = "-n"});
  list_options(arguments->values, arguments->table);
  add_options(*command, arguments->table);
  command->add_option("--guardian", arguments->guardian)->group("");  // the launcher's own use (launch/guardian.h)
  command->callback([command, arguments, &work] {
    if (arguments->guardian >= 0) {
      work = [arguments] { end_with(launch::be_the_guardian(arguments->guardian)); };
      return;
    }
    work = [options = options_of(*arguments, command->remaining())] { end_with(launch::launch(options)); };
  });
}

}  // namespace chorale::app
