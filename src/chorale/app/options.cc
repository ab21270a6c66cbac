#include "chorale/app/options.h"

#include <cmath>

#include "chorale/base/error.h"
#include "chorale/base/printable.h"
#include "chorale/base/shared_object.h"
#include "chorale/train/options.h"
#include "chorale/transport/fabric/fabric_name.h"

namespace chorale::app {
namespace {

using train::Option;
using train::OptionTable;

// A switch has a value where its variable gives one. The parser would take any number for yes or no.
CLI::Validator zero_or_one(const std::string& variable) {
  const auto check = [variable](const std::string& word) {
    if (word == "0" || word == "1" || word == "true" || word == "false") return std::string();
    return concat("takes 0 or 1 (", variable, " does, too), not '", printable(word), "'");
  };
  return {check, ""};
}

void add_row(CLI::App& command, const Option& row, const Note& note) {
  const std::string names = (row.also.empty() ? "" : row.also + ",") + "--" + row.name;
  const auto take = [note, name = row.name](const CLI::results_t& words) {
    note(name, words);
    return true;
  };
  if (std::holds_alternative<bool*>(row.target)) {
    CLI::Option* option = command.add_flag_callback(
        names, [take] { take({"true"}); }, row.help);
    if (!row.variable.empty()) option->envname(row.variable)->check(zero_or_one(row.variable));
    return;
  }
  std::string help = row.help;
  for (size_t i = 0; i < row.choices.size(); ++i) help += (i == 0 ? ": " : ", ") + row.choices[i];
  CLI::Option* option = command.add_option(names, take, help)->envname(row.variable);
  if (!row.value_name.empty()) option->type_name(row.value_name);
  if (std::holds_alternative<std::vector<std::string>*>(row.target)) {
    option->expected(1, CLI::detail::expected_max_vector_size);
  } else {
    option->take_last();
  }
  if (const std::string value = OptionTable::text_of(row); !value.empty()) option->default_str(value);
}

// What cannot work is said before anything is started.
void check_fabric(const std::string& text, int64_t ranks) {
  if (text.empty()) return;
  transport::FabricName fabric;
  try {
    fabric = transport::parse_fabric(text);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(concat("--fabric: ", error.what()));
  }
  CHORALE_CHECK(fabric.kind != "mpi", "--fabric: MPI starts its ranks itself: CHORALE_FABRIC=mpi mpirun -n ", ranks,
                " PROGRAM ARGS...");
  if (fabric.kind != "ucx") return;
  const Availability ucx = shared_object_availability(kUcxObject);
  CHORALE_CHECK(ucx.yes, "--fabric: ", text, " is not available here: ", ucx.reason);
}

}  // namespace

void add_options(CLI::App& command, const OptionTable& table, const Note& note) {
  for (const Option& row : table.rows()) add_row(command, row, note);
}

void add_options(CLI::App& command, const OptionTable& table) {
  add_options(command, table, [&table](const std::string& name, const std::vector<std::string>& words) {
    try {
      table.set(name, words);
    } catch (const InvalidArgument& error) {
      throw CLI::ValidationError(error.what());
    }
  });
}

void list_options(LaunchValues& values, OptionTable& table) {
  using enum train::OptionKind;
  table.add({.name = "nnodes",
             .help = "nodes of the job; the same command is started on each",
             .target = &values.nodes,
             .kind = kHere,
             .least = 1,
             .most = train::kMostNodes});
  table.add({.name = "node-rank",
             .help = "which of them this is",
             .target = &values.node_rank,
             .kind = kHere,
             .most = train::kMostNodes - 1});
  table.add({.name = "rdzv",
             .help = "where node 0 is found",
             .target = &values.rendezvous,
             .kind = kHere,
             .value_name = "HOST:PORT"});
  table.add({.name = "max-restarts",
             .help = "how often all ranks are started again after a failure",
             .target = &values.max_restarts,
             .kind = kHere,
             .most = 1e6});
  table.add({.name = "elastic",
             .help = "go on when ranks die, with at least MIN and at most MAX of them; replacements are started",
             .target = &values.elastic,
             .kind = kHere,
             .value_name = "MIN:MAX"});
  table.add({.name = "join",
             .help = "join a job that was started with --elastic on several nodes, at the place of a launcher's store",
             .target = &values.join,
             .kind = kHere,
             .value_name = "HOST:PORT"});
  table.add({.name = "log-dir",
             .help = "also write each rank's output to a file in this folder",
             .target = &values.log_dir,
             .kind = kHere,
             .value_name = "DIR"});
  table.add({.name = "grace",
             .help = "seconds between SIGTERM and SIGKILL when ranks are stopped",
             .target = &values.grace_s,
             .kind = kHere,
             .most = 1e6});
  table.add({.name = "chaos",
             .help = "faults on purpose: a seed, or a plan such as 'kill@rank=1,call=7;delay@rank=0,call=3,ms=50'",
             .target = &values.chaos,
             .kind = kHere,
             .value_name = "SEED|PLAN",
             .variable = "CHORALE_CHAOS"});
  table.add({.name = "checksum",
             .help = "verify what ranks send each other, not only control messages; costs time",
             .target = &values.checksum,
             .kind = kHere,
             .variable = "CHORALE_CHECKSUM"});
  table.add({.name = "fabric",
             .help = "what connects hosts: tls, or ucx or ucx:DEVICE on a trusted network",
             .target = &values.fabric,
             .kind = kHere,
             .value_name = "F",
             .variable = "CHORALE_FABRIC"});
}

launch::LaunchOptions launch_options(const LaunchValues& values, int64_t ranks) {
  CHORALE_CHECK(values.node_rank < values.nodes, "--node-rank ", values.node_rank, " is none of ", values.nodes,
                values.nodes == 1 ? " node" : " nodes", ", which count from 0; say how many there are with --nnodes");
  CHORALE_CHECK(static_cast<double>(ranks * values.nodes) <= train::kMostWorld, "a job of ", ranks,
                " ranks on each of ", values.nodes, " nodes has more than ", static_cast<int64_t>(train::kMostWorld),
                " ranks");
  check_fabric(values.fabric, ranks);
  launch::LaunchOptions options;
  options.ranks = static_cast<int>(ranks);
  options.nodes = static_cast<int>(values.nodes);
  options.node_rank = static_cast<int>(values.node_rank);
  options.rendezvous = values.rendezvous;
  options.max_restarts = static_cast<int>(values.max_restarts);
  options.log_dir = values.log_dir;
  options.chaos = values.chaos;
  options.checksum = values.checksum;
  options.fabric = values.fabric;
  if (!values.elastic.empty()) {
    options.elastic = launch::ElasticLimits::parse(values.elastic);
    const bool is_alone = values.nodes == 1 && values.join.empty();
    CHORALE_CHECK(is_alone || values.max_restarts == 0,
                  "--max-restarts starts all nodes again; a job on several with --elastic goes on instead");
    CHORALE_CHECK(!is_alone || (options.elastic->least <= ranks && ranks <= options.elastic->most), ranks,
                  " ranks at the start are not within --elastic ", values.elastic);
  }
  CHORALE_CHECK(
      values.join.empty() || (options.elastic && values.nodes == 1 && values.rendezvous.empty()),
      "--join takes the place of --nnodes, --node-rank and --rdzv, and needs the --elastic MIN:MAX of the job");
  options.join = values.join;
  options.grace = std::chrono::milliseconds(std::llround(values.grace_s * 1000));
  return options;
}

CLI::Validator between(double least, double most) {
  return CLI::Validator(
      [least, most](const std::string& word) {
        double value = 0;
        train::OptionTable table;
        table.add({.name = "", .help = "", .target = &value, .least = least, .most = most});
        try {
          table.set("", {word});
          return std::string();
        } catch (const InvalidArgument& error) {
          return std::string(error.what()).substr(3);  // without the name that it has not
        }
      },
      "");
}

}  // namespace chorale::app
