// `chorale resize RUN N`: a job that was started with --elastic goes on with another number of ranks.
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>

#include "chorale/app/commands.h"
#include "chorale/app/options.h"
#include "chorale/base/error.h"
#include "chorale/launch/control.h"
#include "chorale/train/options.h"
#include "chorale/train/run_folder.h"
#include "chorale/transport/host_identity.h"

namespace chorale::app {
namespace {

// Its parent; 0 where there is no such process.
pid_t parent_of(pid_t process) {
  std::ifstream status(concat("/proc/", process, "/status"));
  for (std::string word; status >> word;) {
    if (word != "PPid:") continue;
    pid_t parent = 0;
    status >> parent;
    return parent;
  }
  return 0;
}

// Given a folder, the launcher whose rank 0 holds the run's lock; a number is the launcher's own.
pid_t launcher_of(const std::string& run) {
  if (!run.empty() && run.find_first_not_of("0123456789") == std::string::npos && run.size() < 10)
    return std::stoi(run);
  std::istringstream lock(train::RunLock::owner(run));  // "process 123 on HOST, …"
  std::string word, on, host;
  pid_t owner = 0;
  lock >> word >> owner >> on >> host;
  if (!host.empty() && host.back() == ',') host.pop_back();
  CHORALE_CHECK_STATE(owner > 0 && host == transport::host_name() && parent_of(owner) > 0, "[resize] nobody trains in ",
                      run, " on this host");
  return parent_of(owner);
}

}  // namespace

void add_resize(CLI::App& program, Work& work) {
  CLI::App* command = program.add_subcommand("resize", "Let a job that runs with --elastic go on with N ranks");
  struct Options {
    std::string run;
    int64_t ranks = 0;
  };
  auto options = std::make_shared<Options>();
  command->add_option("run", options->run, "the folder of the run, or the process number of chorale run")->required();
  command->add_option("ranks", options->ranks, "that it is to have")->required()->check(between(1, train::kMostRanks));
  command->callback([options, &work] {
    work = [options] {
      const std::string answer = launch::ask_launcher(launcher_of(options->run), concat("resize ", options->ranks));
      CHORALE_CHECK_STATE(!answer.starts_with("refused"), "[resize] ", answer);
      std::cout << answer << '\n';
    };
  });
}

}  // namespace chorale::app
