// `chorale train`: options from the command line, from files and from the run that goes on; ranks; and the trainer.
#include <sys/utsname.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <thread>

#include "chorale/app/commands.h"
#include "chorale/app/program.h"
#include "chorale/base/config.h"
#include "chorale/base/cpu.h"
#include "chorale/base/error.h"
#include "chorale/base/host.h"
#include "chorale/base/log.h"
#include "chorale/base/parallel_for.h"
#include "chorale/comm/objects.h"
#include "chorale/comm/world.h"
#include "chorale/json/json_write.h"
#include "chorale/kernel/cpu/dnnl/runtime.h"
#include "chorale/launch/launcher.h"
#include "chorale/train/dry_run.h"
#include "chorale/train/tasks.h"
#include "chorale/train/trainer.h"
#include "chorale/transport/launcher_variables.h"
#include "chorale/transport/store/memory_store.h"
#include "chorale/vec/target.h"

namespace chorale::app {
namespace {

namespace fs = std::filesystem;
using train::Option;
using train::OptionTable;

// The command of one task, with the options that were given.
struct TrainCommand {
  std::unique_ptr<train::TaskKind> kind;
  train::TrainOptions options;
  OptionTable table;
  std::vector<std::pair<std::string, std::vector<std::string>>> given;
  std::string config;  // file of options
  int output = -1;     // descriptor of what rank 0 writes to; -1: standard output

  // The launcher's.
  int64_t nodes = 1, node_rank = 0, max_restarts = 0;
  double grace_s = 60;  // enough to save
  std::string rendezvous, log_dir, chaos;
  bool checksum = false;

  void list_options();
  void resolve();
  int64_t ranks() const;  // on this node
  bool resumes() const { return options.resume || options.resume_previous; }

 private:
  void apply_given() const;
  std::optional<json::Value> apply_run();
};

void TrainCommand::list_options() {
  train::list_options(options, table);
  kind->list_options(options, table);
  using enum train::OptionKind;
  table.add({.name = "nnodes",
             .help = "nodes of the job; the same command is started on each",
             .target = &nodes,
             .kind = kHere,
             .least = 1});
  table.add({.name = "node-rank", .help = "which of them this is", .target = &node_rank, .kind = kHere});
  table.add({.name = "rdzv",
             .help = "where node 0 is found",
             .target = &rendezvous,
             .kind = kHere,
             .value_name = "HOST:PORT"});
  table.add({.name = "max-restarts",
             .help = "how often all ranks are started again after a failure, from the last checkpoint",
             .target = &max_restarts,
             .kind = kHere});
  table.add({.name = "log-dir",
             .help = "also write each rank's output to a file in this folder",
             .target = &log_dir,
             .kind = kHere,
             .value_name = "DIR"});
  table.add({.name = "grace",
             .help = "seconds between SIGTERM and SIGKILL when ranks are stopped",
             .target = &grace_s,
             .kind = kHere});
  table.add({.name = "chaos",
             .help = "make faults on purpose, as a plan or a seed says (see chorale run --help)",
             .target = &chaos,
             .kind = kHere});
  table.add({.name = "checksum",
             .help = "verify what ranks send each other, not only control messages; costs time",
             .target = &checksum,
             .kind = kHere});
}

// By default one for each core, or as many as can share a batch equally.
int64_t TrainCommand::ranks() const {
  if (options.ranks > 0) return options.ranks;
  int64_t ranks = usable_cores();
  while (ranks > 1 && options.batch % (ranks * nodes * options.accumulate) != 0) --ranks;
  return ranks;
}

json::Value read_json(const fs::path& path) {
  return json::parse(path.string(), io::MappedFile::open(path)->text(), {.bytes = 1'000'000});
}

// A file of options, then the command line, which wins.
void TrainCommand::apply_given() const {
  if (!config.empty()) {
    const json::Value file = read_json(config);
    const json::Object& object = file.object(config);
    // A model's config.json, as Hugging Face's libraries write it, says what it describes; a file of options does not.
    if (json::find(object, "model_type")) {
      table.set("model-config", {config});
    } else {
      table.read(config, object);
    }
  }
  try {
    for (const auto& [name, words] : given) table.set(name, words);
  } catch (const InvalidArgument& error) {
    throw CLI::ValidationError(error.what());
  }
}

// Options of the run that goes on; what is given now wins. Returns those that it began with, or nothing when it ended
// before they were written down.
std::optional<json::Value> TrainCommand::apply_run() {
  CHORALE_CHECK(!options.out.empty(), "[train] --resume needs the folder of the run: --out DIR");
  CHORALE_CHECK(fs::is_directory(options.out), "[train] there is no run in ", options.out, ": no such folder");
  const fs::path path = fs::path(options.out) / "config.json";
  if (!fs::exists(path)) return {};
  json::Value before = read_json(path);
  table.read(path.string(), before.object(path.string()));
  apply_given();
  return before;
}

void TrainCommand::resolve() {
  apply_given();
  // What the launcher starts again after a failure goes on.
  if (config::env("TORCHELASTIC_RESTART_COUNT").value_or("0") != "0") options.resume = true;
  const auto before = resumes() ? apply_run() : std::optional<json::Value>();
  kind->settle(options);
  if (before) check_unchanged(table, before->object("options"), options.out);
}

// runs/TASK-1, or the next number that is free; made at once, so that nobody else takes it.
std::string new_folder(const std::string& task) {
  fs::create_directories("runs");
  for (int number = 1;; ++number) {
    fs::path path = fs::path("runs") / concat(task, "-", number);
    if (fs::create_directory(path)) return path.string();
  }
}

// This program with the same arguments, once for each rank. Lines of ranks come with their rank in front, which a live
// line does not survive: rank 0 gets our own output as well.
int start_ranks(const TrainCommand& command) {
  const int output = dup(STDOUT_FILENO);  // inherited by the ranks
  std::vector<std::string> line = {"/proc/self/exe"};
  std::ifstream words("/proc/self/cmdline");
  std::string word;
  std::getline(words, word, '\0');  // the program
  while (std::getline(words, word, '\0')) line.push_back(word);
  line.insert(line.end(), {"--output", std::to_string(output)});
  if (!command.options.out.empty()) line.insert(line.end(), {"--out", command.options.out});
  launch::LaunchOptions options;
  options.ranks = static_cast<int>(command.ranks());
  options.nodes = static_cast<int>(command.nodes);
  options.node_rank = static_cast<int>(command.node_rank);
  options.rendezvous = command.rendezvous;
  options.max_restarts = static_cast<int>(command.max_restarts);
  options.log_dir = command.log_dir;
  options.chaos = command.chaos;
  options.checksum = command.checksum;
  options.grace = std::chrono::milliseconds(static_cast<int64_t>(command.grace_s * 1000));
  options.command = std::move(line);
  return launch::launch(options);
}

// All ranks train with the options of rank 0, which alone need see the files.
void share_options(const OptionTable& table, const comm::Group& group) {
  std::vector<comm::Value> text{json::write(table.values())};
  comm::broadcast_object_list(group, text, 0);
  const json::Value values = json::parse("options of rank 0", text[0].as<std::string>());
  table.read("options of rank 0", values.object("options"));
}

json::Object facts_of_machine() {
  utsname system{};
  ::uname(&system);
  const auto gibibytes = static_cast<double>(memory_room().total_bytes) / (1 << 30);
  kernel::cpu::dnnl::initialize();
  return {{"version", json::Value(std::string(version()))},
          {"processor", json::Value(std::string(cpu_brand()))},
          {"vectors", json::Value(std::string(vec::target_name()))},
          {"cores", json::Value(int64_t{machine_cores()})},
          {"memory_gib", json::Value(std::round(gibibytes * 10) / 10)},
          {"system", json::Value(concat(system.sysname, " ", system.release))},
          {"oneDNN", json::Value(kernel::cpu::dnnl::version())},
          {"compiler", json::Value(std::string(__VERSION__))}};
}

train::Ending run_rank(const TrainCommand& command, const comm::Group& group) {
  share_options(command.table, group);
  set_thread_count(static_cast<int>(command.options.threads));
  std::FILE* out = command.output >= 0 ? fdopen(command.output, "w") : stdout;
  CHORALE_CHECK(out, "[train] descriptor ", command.output, " cannot be written to");
  return train::train({.kind = *command.kind,
                       .options = command.options,
                       .table = command.table,
                       .group = group,
                       .folder = command.options.out,
                       .facts = facts_of_machine(),
                       .out = out});
}

void run_train(TrainCommand& command) {
  command.resolve();
  if (command.options.dry_run) {
    set_thread_count(static_cast<int>(command.options.threads));
    train::dry_run(*command.kind, command.options, static_cast<int>(command.ranks() * command.nodes), stdout);
    return;
  }
  const bool is_rank = config::one_of_several_ranks();
  // The run's folder is rank 0's.
  if (is_rank ? transport::find_launcher_variables().rank.value_or(0) == 0 : command.node_rank == 0) {
    if (command.options.out.empty()) command.options.out = new_folder(command.kind->name());
    if (!is_rank && !command.resumes()) train::check_is_new(command.options.out);
  }
  if (!is_rank && command.ranks() * command.nodes > 1) {
    if (const int status = start_ranks(command); status != 0) {
      std::error_code not_empty;
      fs::remove(command.options.out, not_empty);  // of a run that failed before it began
      throw CLI::RuntimeError(status);
    }
    return;
  }
  comm::World world;
  if (is_rank) {
    world.init();
    if (!transport::find_launcher_variables().store)
      log_as(concat("rank ", world.group().rank()));  // ours puts it before
  } else {
    world.init(std::make_shared<transport::MemoryStore>(), 0, 1);
  }
  try {
    if (run_rank(command, world.group()) == train::Ending::kInterrupted) throw CLI::RuntimeError(128 + SIGINT);
  } catch (const train::ToldByRank0&) {
    std::this_thread::sleep_for(std::chrono::seconds(1));  // rank 0 ends first: launchers name who did
    throw CLI::RuntimeError(1);
  }
}

void add_row(CLI::App& command, const Option& row, const std::shared_ptr<TrainCommand>& state) {
  const std::string names = (row.also.empty() ? "" : row.also + ",") + "--" + row.name;
  const auto note = [state, name = row.name](const CLI::results_t& words) {
    state->given.emplace_back(name, words);
    return true;
  };
  if (std::holds_alternative<bool*>(row.target)) {
    command.add_flag_callback(
        names, [note] { note({"true"}); }, row.help);
    return;
  }
  std::string help = row.help;
  for (size_t i = 0; i < row.choices.size(); ++i) help += (i == 0 ? ": " : ", ") + row.choices[i];
  CLI::Option* option = command.add_option(names, note, help);
  if (!row.value_name.empty()) option->type_name(row.value_name);
  if (std::holds_alternative<std::vector<std::string>*>(row.target)) {
    option->expected(1, CLI::detail::expected_max_vector_size);
  } else {
    option->take_last();
  }
  if (const std::string value = OptionTable::text_of(row); !value.empty()) option->default_str(value);
}

}  // namespace

void add_train(CLI::App& program) {
  CLI::App* train = program.add_subcommand("train", "Train a model");
  train->require_subcommand(1);
  for (auto& kind : train::task_kinds()) {
    const auto state = std::make_shared<TrainCommand>();
    state->kind = std::move(kind);
    state->list_options();
    CLI::App* command = train->add_subcommand(state->kind->name(), state->kind->help());
    for (const Option& row : state->table.rows()) add_row(*command, row, state);
    command
        ->add_option("--config", state->config,
                     "Options from a JSON file (the command line wins), or a model's config.json, as --model-config")
        ->type_name("FILE");
    command->add_option("--output", state->output)->group("");
    command->callback([state] { run_train(*state); });
  }
}

}  // namespace chorale::app
