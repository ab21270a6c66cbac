// `chorale train`: options from the command line, from files and from the run that goes on; ranks; and the trainer.
#include "chorale/app/train.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <thread>

#include "chorale/app/options.h"
#include "chorale/app/program.h"
#include "chorale/base/config.h"
#include "chorale/base/cpu.h"
#include "chorale/base/error.h"
#include "chorale/base/host.h"
#include "chorale/base/log.h"
#include "chorale/base/parallel_for.h"
#include "chorale/comm/objects.h"
#include "chorale/comm/world.h"
#include "chorale/io/file.h"
#include "chorale/json/json_write.h"
#include "chorale/kernel/cpu/dnnl/runtime.h"
#include "chorale/launch/launcher.h"
#include "chorale/launch/room.h"
#include "chorale/train/dry_run.h"
#include "chorale/train/job_device.h"
#include "chorale/train/tasks.h"
#include "chorale/train/told_by_rank_0.h"
#include "chorale/train/trainer.h"
#include "chorale/transport/launcher_variables.h"
#include "chorale/transport/store/memory_store.h"
#include "chorale/vec/target.h"

namespace chorale::app {
namespace {

namespace fs = std::filesystem;
using train::OptionTable;

// The command of one task, with the options that were given.
struct TrainCommand {
  std::unique_ptr<train::TaskKind> kind;
  train::TrainOptions options;
  OptionTable table;
  std::vector<std::pair<std::string, std::vector<std::string>>> given;
  std::string config;    // file of options
  int output = -1;       // descriptor of what rank 0 writes to; -1: standard output
  std::string launched;  // options as the launcher of an elastic job has them
  TrainParts parts;

  LaunchValues launching{.grace_s = 60};  // enough to save

  void list_options();
  void resolve();
  int64_t ranks() const;         // on this node
  int ranks_of_replica() const;  // that share a model
  int world_size() const { return launch_options(launching, ranks()).ranks * static_cast<int>(launching.nodes); }
  bool resumes() const { return options.resume || options.resume_previous; }
  bool is_elastic() const { return !launching.elastic.empty(); }
  bool is_first() const;

 private:
  void apply_given() const;
  std::optional<json::Object> apply_run();
  void check_elastic() const;
  void check_elastic_batch() const;
};

void TrainCommand::list_options() {
  train::list_options(options, table);
  kind->list_options(options, table);
  app::list_options(launching, table);
}

// The number of ranks: by default one for each GPU, or else core, or as many as can share a batch equally; at least as
// many as share a model.
int64_t TrainCommand::ranks() const {
  if (options.ranks > 0) return options.ranks;
  if (!options.hybrid.empty()) {
    const train::JobRanks::Shards shards = train::hybrid_of(options.hybrid);
    return std::max<int64_t>(train::product("ranks", {shards.replicas, shards.ranks, options.tp}) / launching.nodes, 1);
  }
  if (options.dp > 0) return std::max<int64_t>(options.dp * options.tp / launching.nodes, 1);
  const int64_t gpus = train::gpus_of(options);
  int64_t replicas = gpus > 0 ? gpus : std::max<int64_t>(usable_cores() / options.tp, 1);
  const auto pieces = [&] {
    return train::product("ranks and pieces of a batch", {replicas, launching.nodes, options.accumulate});
  };
  while (replicas > 1 && options.batch % pieces() != 0) --replicas;
  return replicas * options.tp;
}

int TrainCommand::ranks_of_replica() const {
  if (!options.fsdp) return static_cast<int>(options.tp);
  if (options.hybrid.empty()) return world_size();
  return train::hybrid_of(options.hybrid).ranks * static_cast<int>(options.tp);
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

// Whether the folder of the run is this process's business: rank 0's, and before there are ranks the first node's.
bool TrainCommand::is_first() const {
  return config::one_of_several_ranks() ? transport::find_launcher_variables().rank.value_or(0) == 0
                                        : launching.node_rank == 0;
}

// Options of the run that goes on; what is given now wins. Returns those that it has, or nothing when it ended before
// they were written down.
std::optional<json::Object> TrainCommand::apply_run() {
  CHORALE_CHECK(!options.out.empty(), "[train] --resume needs the folder of the run: --out DIR");
  std::error_code error;
  // All others get them from rank 0. Where ranks die a node is asked for those of new ones, so it looks, too.
  if (!is_first() && !(is_elastic() && fs::is_directory(options.out, error))) return {};
  CHORALE_CHECK(fs::is_directory(options.out, error), "[train] there is no run in ", options.out, ": ",
                error ? error.message() : "that is no folder");
  // A job that still runs is named now, and by one process.
  const bool is_launched = output >= 0;
  if (!is_launched && is_first()) {
    const train::RunLock nobody_else(options.out);
  }
  train::check_has_no_links(options.out);
  std::optional<train::RunOptions> found = train::options_of_run(options.out, table);
  if (!found) return {};
  if (!is_launched) {
    for (const std::string& difference : found->differences) log_warning(difference);
  }
  table.read(concat("options of the run in ", options.out), found->values);
  // Another layout of ranks than the run had says how many there are.
  if (std::any_of(given.begin(), given.end(),
                  [](const auto& row) { return row.first == "hybrid" || row.first == "dp"; }))
    options.ranks = 0;
  apply_given();
  // What only a split model has does not keep the run from going on with a whole one.
  if (options.tp == 1) options.sequence_parallel = false;
  return std::move(found->values);
}

void TrainCommand::resolve() {
  apply_given();
  if (is_elastic()) {
    check_elastic();
  } else if (options.elastic_batch != "global") {
    throw CLI::ValidationError("--elastic-batch " + options.elastic_batch +
                               " says what stays when ranks come and go: give --elastic MIN:MAX, too");
  }
  if (!options.out.empty() && is_first()) train::check_can_be_folder(options.out);
  // What the launcher starts again after a failure goes on.
  if (transport::restart_count() > 0) options.resume = true;
  // A rank of an elastic job may be started when rank 0 is long gone: all have the launcher's options.
  if (!launched.empty()) {
    const json::Value values = json::parse("options of the launcher", launched);
    return table.read("options of the launcher", values.object("options"));
  }
  const auto before = resumes() ? apply_run() : std::optional<json::Object>();
  kind->settle(options);
  if (before) check_unchanged(table, *before, options.out);
  if (config::one_of_several_ranks()) return;
  train::device_of(options, 0);  // a device that is not there is said by one process
  try {
    launch_options(launching, ranks());
  } catch (const InvalidArgument& error) {
    throw CLI::ValidationError(error.what());
  }
  if (is_elastic()) check_elastic_batch();
  if (is_first()) train::check_ranks(options, world_size());  // so that one process complains, and not each rank
}

// What a job that loses ranks cannot be.
void TrainCommand::check_elastic() const {
  const auto refuse = [](const std::string& why) { throw CLI::ValidationError("--elastic " + why); };
  if (options.tp > 1) refuse("is not for models that --tp splits; --max-restarts goes on from the last checkpoint");
  if (options.dp > 0) refuse("says how many ranks there may be: leave out --dp");
  if (options.dry_run) refuse("trains: leave out --dry-run");
  if (config::one_of_several_ranks() && !config::env("CHORALE_ELASTIC_FD"))
    refuse(
        "is for ranks that it starts itself: another launcher, such as mpirun, torchrun or chorale run without "
        "--elastic, does not tell ranks who of them has died");
  if (!launching.join.empty())
    refuse(
        "trains on the nodes that it was started on: leave out --join; a program of one's own with parallel::Elastic "
        "can be joined (chorale run)");
  if (launching.nodes > 1 && options.out.empty())
    refuse("on several nodes needs --out DIR: rank 0, which has the run's folder, may come to be on any of them");
  if (options.device != "cpu" && train::gpus_of(options) > 0) refuse("computes on the CPU so far: give --device cpu");
}

// A job may grow to MAX ranks at any time, and would end there if a rank had nothing to do.
void TrainCommand::check_elastic_batch() const {
  const int most = launch::ElasticLimits::parse(launching.elastic).most;
  if (options.elastic_batch == "global" && most > options.batch)
    throw CLI::ValidationError(concat("--elastic ", launching.elastic, ": a batch of ", options.batch,
                                      " examples is too small for ", most,
                                      " ranks; give a larger --batch, a smaller MAX, or --elastic-batch local"));
}

// The words of this process's command line, behind the program's name.
std::vector<std::string> own_words() {
  std::vector<std::string> all;
  std::ifstream words("/proc/self/cmdline");
  std::string word;
  std::getline(words, word, '\0');  // the program
  while (std::getline(words, word, '\0')) all.push_back(word);
  return all;
}

// What a rank of the smallest job has in memory for itself alone.
constexpr uint64_t kLeastBytes = uint64_t{8} << 20;

// This program with the same arguments, once for each rank. Lines of ranks come with their rank in front, which a live
// line does not survive: rank 0 gets our own output as well.
int start_ranks(const TrainCommand& command) {
  const int output = dup(STDOUT_FILENO);  // inherited by the ranks
  std::vector<std::string> line = {"/proc/self/exe"};
  const std::vector<std::string> words = own_words();
  line.insert(line.end(), words.begin(), words.end());
  line.insert(line.end(), {"--output", std::to_string(output)});
  if (!command.options.out.empty()) line.insert(line.end(), {"--out", command.options.out});
  if (command.is_elastic()) line.insert(line.end(), {"--launched", json::write(command.table.values())});
  launch::LaunchOptions options = launch_options(command.launching, command.ranks());
  if (command.options.dry_run) {  // of one replica, here
    options.ranks = command.ranks_of_replica();
    options.nodes = 1;
    options.node_rank = 0;
  }
  options.final_statuses = {kNotFinite, kOutputLost};
  if (command.is_elastic()) options.final_statuses.push_back(1);  // what a rank says itself is no loss of a rank
  launch::check_room({.ranks = options.ranks, .bytes = kLeastBytes});
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

// The status that the process ends with.
int run_rank(const TrainCommand& command, const comm::Group& group, train::StepLoop* loop) {
  if (!loop) share_options(command.table, group);
  set_thread_count(static_cast<int>(command.options.threads));
  std::FILE* out = command.output >= 0 ? fdopen(command.output, "w") : stdout;
  CHORALE_CHECK(out, "[train] descriptor ", command.output, " cannot be written to");
  if (command.options.dry_run) {
    train::dry_run(*command.kind, command.options, command.world_size(), group, out, command.parts.shard_fully);
    return std::fflush(out) == 0 ? 0 : kOutputLost;
  }
  train::Output output(out);
  const train::Ending ending = train::train({.kind = *command.kind,
                                             .options = command.options,
                                             .table = command.table,
                                             .group = group,
                                             .folder = command.options.out,
                                             .out = output,
                                             .facts = facts_of_machine(),
                                             .shard_fully = command.parts.shard_fully,
                                             .loop = loop});
  if (ending == train::Ending::kInterrupted) return 128 + SIGINT;
  return output.has_failed() ? kOutputLost : 0;
}

// Returns the status that the process ends with when all ranks end their work, so that they part in peace: a rank that
// an exception takes out of its group is one that the others blame.
int train_as_rank(const TrainCommand& command, bool is_one_of_several) {
  comm::World world;
  std::unique_ptr<train::StepLoop> loop;
  if (command.is_elastic()) {
    loop = command.parts.make_loop();
  } else if (is_one_of_several) {
    world.init();
    if (!transport::find_launcher_variables().store)
      log_as(concat("rank ", world.group().rank()));  // ours puts it before
  } else {
    world.init(std::make_shared<transport::MemoryStore>(), 0, 1);
  }
  const auto let_rank_0_end_first = [] { std::this_thread::sleep_for(std::chrono::seconds(1)); };  // launchers name it
  const auto is_first = [&] { return (loop ? loop->group() : world.group()).rank() == 0; };
  try {
    return run_rank(command, loop ? loop->group() : world.group(), loop.get());
  } catch (const train::ToldByRank0&) {
    let_rank_0_end_first();
    throw CLI::RuntimeError(1);
  } catch (const train::NotFinite& error) {
    if (is_first()) {
      std::cerr << "chorale: " << error.what() << '\n';
    } else {
      let_rank_0_end_first();
    }
    throw CLI::RuntimeError(kNotFinite);
  }
}

void run_train(TrainCommand& command) {
  std::signal(SIGXFSZ, SIG_IGN);  // a limit on files is an error like a full disk
  std::signal(SIGTTOU, SIG_IGN);  // a job in the background of its terminal may print (stty tostop)
  // Training that goes on when ranks die is in a program of its own: the first build of this one goes without it.
  if (command.is_elastic() && !command.parts.make_loop)
    become("elastic", concat("train ", command.kind->name(), " --elastic ", command.launching.elastic), own_words());
  // Fully sharded training is a program of its own, too; the one above has it as well.
  if (command.options.fsdp && !command.parts.shard_fully)
    become("sharded", concat("train ", command.kind->name(), " --fsdp"), own_words());
  const bool is_rank = config::one_of_several_ranks(), is_real = !command.options.dry_run;
  train::MadeFolders made;
  if (command.is_first() && is_real) {
    std::string& out = command.options.out;
    if (out.empty()) out = made.make_numbered(command.kind->name());
    if (!is_rank && !command.resumes()) {
      train::check_is_new(out);
      train::check_has_no_folders(out, command.launching.log_dir);
    }
    if (!is_rank) made.make(out);
  }
  if (!is_rank && (command.is_elastic() || (is_real ? command.world_size() : command.ranks_of_replica()) > 1)) {
    if (const int status = start_ranks(command); status != 0) throw CLI::RuntimeError(status);
    return;
  }
  if (const int status = train_as_rank(command, is_rank); status != 0) throw CLI::RuntimeError(status);
}

}  // namespace

void add_train(CLI::App& program, Work& work) { add_train_with(program, work, {}); }

void add_train_with(CLI::App& program, Work& work, const TrainParts& parts) {
  CLI::App* train = program.add_subcommand("train", "Train a model");
  train->require_subcommand(1);
  for (auto& kind : train::task_kinds()) {
    const auto state = std::make_shared<TrainCommand>();
    state->kind = std::move(kind);
    state->parts = parts;
    state->list_options();
    CLI::App* command = train->add_subcommand(state->kind->name(), state->kind->help());
    add_options(*command, state->table, [given = &state->given](const std::string& name, const auto& words) {
      given->emplace_back(name, words);
    });
    command
        ->add_option("--config", state->config,
                     "Options from a JSON file (the command line wins), or a model's config.json, as --model-config")
        ->type_name("FILE");
    command->add_option("--output", state->output)->group("");
    command->add_option("--launched", state->launched)->group("");
    command->callback([state, &work] {
      state->resolve();
      work = [state] { run_train(*state); };
    });
  }
  add_program(*train, work, "recommender", kRecommenderHelp, {"train", "recommender"});
}

}  // namespace chorale::app
