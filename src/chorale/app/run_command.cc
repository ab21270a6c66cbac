// `chorale run`: starts a program as the ranks of a job.
#include <memory>
#include <string>

#include "chorale/app/commands.h"
#include "chorale/base/error.h"
#include "chorale/base/shared_object.h"
#include "chorale/launch/guardian.h"
#include "chorale/launch/launcher.h"
#include "chorale/transport/fabric/fabric_name.h"

namespace chorale::app {
namespace {

struct RunArguments {
  launch::LaunchOptions options;
  double grace_s = 10;
  int guardian = -1;
};

// What cannot work is said before anything is started.
void check_fabric(const std::string& text, int ranks) {
  if (text.empty()) return;
  const auto fail = [](const std::string& why) { throw CLI::ValidationError("--fabric", why); };
  try {
    const transport::FabricName fabric = transport::parse_fabric(text);
    if (fabric.kind == "mpi")
      fail(concat("MPI starts its ranks itself: CHORALE_FABRIC=mpi mpirun -n ", ranks, " PROGRAM ARGS..."));
    if (fabric.kind != "ucx") return;
    const Availability ucx = shared_object_availability(kUcxObject);
    if (!ucx.yes) fail(concat(text, " is not available here: ", ucx.reason));
  } catch (const InvalidArgument& error) {
    fail(error.what());
  }
}

int run_command(RunArguments& arguments, std::vector<std::string> words) {
  if (arguments.guardian >= 0) return launch::be_the_guardian(arguments.guardian);
  // Everything after the program is the program's; an option before it that we do not know ends up here.
  if (!words.empty() && words.front().starts_with('-')) throw CLI::ExtrasError({words.front()});
  if (words.empty()) throw CLI::RequiredError("PROGRAM");
  if (arguments.options.ranks == 0) throw CLI::RequiredError("-n");
  check_fabric(arguments.options.fabric, arguments.options.ranks);
  arguments.options.command = std::move(words);
  arguments.options.grace = std::chrono::milliseconds(static_cast<int64_t>(arguments.grace_s * 1000));
  return launch::launch(arguments.options);
}

}  // namespace

void add_run(CLI::App& program) {
  CLI::App* command = program.add_subcommand("run", "Start a program as the ranks of a job: run -n 4 PROGRAM ARGS...");
  command->prefix_command();
  command->footer(
      "PROGRAM gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, ...). The exit status is 0 when every rank "
      "ended\n"
      "with 0, else that of the first rank that failed (128 + N: killed by signal N).");
  const auto arguments = std::make_shared<RunArguments>();
  launch::LaunchOptions& options = arguments->options;
  options.ranks = 0;
  const auto number = [&](const char* names, int& value, int least, const char* help) {
    return command->add_option(names, value, help)->check(CLI::Range(least, 1'000'000).description(""))->type_name("N");
  };
  number("-n,--nproc-per-node", options.ranks, 1, "Ranks on this node");
  number("--nnodes", options.nodes, 1, "Nodes of the job; the same command is started on each")->capture_default_str();
  number("--node-rank", options.node_rank, 0, "Which of them this is")->capture_default_str();
  command->add_option("--rdzv", options.rendezvous, "Where node 0 is found")->type_name("HOST:PORT");
  number("--max-restarts", options.max_restarts, 0, "How often all ranks are started again after a failure")
      ->capture_default_str();
  command->add_option("--log-dir", options.log_dir, "Also write each rank's output to a file in this folder")
      ->type_name("DIR");
  command->add_option("--grace", arguments->grace_s, "Between SIGTERM and SIGKILL when ranks are stopped")
      ->check(CLI::NonNegativeNumber.description(""))
      ->type_name("SECONDS")
      ->capture_default_str();
  command
      ->add_option("--chaos", options.chaos,
                   "Faults on purpose: a seed, or a plan such as 'kill@rank=1,call=7;delay@rank=0,call=3,ms=50'")
      ->envname("CHORALE_CHAOS")
      ->type_name("SEED|PLAN");
  command->add_flag("--checksum", options.checksum, "Verify payloads, not only control messages; costs time")
      ->envname("CHORALE_CHECKSUM");
  command->add_option("--fabric", options.fabric, "What connects hosts: tls, or ucx or ucx:DEVICE on a trusted network")
      ->envname("CHORALE_FABRIC")
      ->type_name("F");
  command->add_option("--guardian", arguments->guardian)->group("");  // the launcher's own use (launch/guardian.h)
  command->callback([command, arguments] {
    const int status = run_command(*arguments, command->remaining());
    if (status != 0) throw CLI::RuntimeError(status);
  });
}

}  // namespace chorale::app
