// Jobs of fully sharded models on a device. The simulated one has the CPU's kernels behind streams, and memory that the
// host cannot touch: everything has the CPU's bits, and whatever reads a tensor directly fails.
#include "chorale/app/sharded/shard_fully.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <regex>

#include "chorale/base/parallel_for.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/eager/sim_kernels.h"
#include "chorale/io/file.h"
#include "chorale/snapshot/snapshot.h"
#include "chorale/train/tasks.h"
#include "chorale/train/trainer.h"

namespace chorale::app {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::IsEmpty;

struct Where {
  std::string device = "cpu";
  bool offload = false;
};

// A job on the text in `folder`, as one rank of the group; what rank 0 printed is in FOLDER/RUN.txt afterwards.
void train_in(const fs::path& folder, const std::string& run, const std::string& task, const comm::Group& group,
              const Where& where, int64_t steps, bool resume = false) {
  set_thread_count(1);
  const std::unique_ptr<train::TaskKind> kind = task == "gpt" ? train::gpt_kind() : train::bert_kind();
  train::TrainOptions options;
  train::OptionTable table;
  list_options(options, table);
  kind->list_options(options, table);
  const std::map<std::string, std::string> words{
      {"text", (folder / "text").string()},
      {"tokenizer", "bytes"},
      {"context", "16"},
      {"layers", "2"},
      {"heads", "2"},
      {"width", "16"},
      {"dropout", "0.1"},
      {"batch", "8"},
      {"steps", std::to_string(steps)},
      {"lr", "0.01"},
      {"schedule", "constant"},
      {"warmup", "0"},  // its length follows from the number of steps
      {"clip", "0.5"},
      {"device", where.device},
  };
  for (const auto& [name, word] : words) table.set(name, {word});
  if (task == "gpt") table.set("sample-tokens", {"3"});
  options.fsdp = true;
  options.offload = where.offload;
  options.resume = resume;
  kind->settle(options);
  std::FILE* const file = std::fopen(group.rank() == 0 ? (folder / (run + ".txt")).c_str() : "/dev/null", "a");
  train::Output out(file);
  EXPECT_EQ(train::train({.kind = *kind,
                          .options = options,
                          .table = table,
                          .group = group,
                          .folder = folder / run,
                          .out = out,
                          .shard_fully = shard_fully}),
            train::Ending::kDone);
  std::fclose(file);
}

// Everything that a checkpoint has, by key.
std::map<std::string, std::string> saved_by(const fs::path& run, int step) {
  std::map<std::string, std::string> all;
  for (const snapshot::TensorChunk& chunk : snapshot::read(run / concat("checkpoints/step-0000000", step)).chunks) {
    all[chunk.key].assign(static_cast<const char*>(chunk.local.raw()),
                          static_cast<size_t>(chunk.local.elems()) * chunk.local.elem_bytes());
  }
  return all;
}

// The keys of what one of them has otherwise than the other.
std::vector<std::string> differences(const std::map<std::string, std::string>& a,
                                     const std::map<std::string, std::string>& b) {
  std::vector<std::string> keys;
  for (const auto& [key, bytes] : a) {
    if (const auto found = b.find(key); found == b.end() || found->second != bytes) keys.push_back(key);
  }
  for (const auto& [key, bytes] : b) {
    if (!a.contains(key)) keys.push_back(key);
  }
  return keys;
}

struct Printed {
  std::string text;
  double peak_mib = 0;  // of a step, as it was said before the first one
};
Printed printed_by(const fs::path& folder, const std::string& run) {
  Printed printed{std::string(io::MappedFile::open(folder / (run + ".txt"))->text())};
  std::smatch found;
  if (std::regex_search(printed.text, found, std::regex("memory of a rank: (\\S+) MiB at the peak")))
    printed.peak_mib = std::stod(found[1]);
  return printed;
}

void expect_the_same_on_a_device(const std::string& task) {
  const pid_t parent = comm::is_rank_process() ? ::getppid() : ::getpid();  // all processes of this test know it
  const fs::path folder = fs::temp_directory_path() / concat("chorale-shard-fully-", task, "-", parent);
  if (!comm::is_rank_process()) {
    fs::create_directories(folder);
    std::string text;
    for (int i = 0; i < 150; ++i) text += concat("And the ", i * i % 71, "th day was like the ", i % 7, "th.\n");
    io::write_file(folder / "text", text);
  }
  const auto ended = comm::run_processes(2, [&](comm::Group& group) {
    eager::add_sim_device({.most_delay = std::chrono::microseconds(20)});
    const Where there{"sim:0"}, beside{"sim:0", true};
    train_in(folder, "here", task, group, {}, 4);
    train_in(folder, "there", task, group, there, 4);
    train_in(folder, "beside", task, group, beside, 2);
    train_in(folder, "beside", task, group, beside, 4, true);
  });
  EXPECT_EQ(ended, (std::vector<int>{0, 0}));
  const auto here = saved_by(folder / "here", 4);
  EXPECT_GT(here.size(), 20u);
  EXPECT_THAT(differences(saved_by(folder / "there", 4), here), IsEmpty());
  EXPECT_THAT(differences(saved_by(folder / "beside", 4), here), IsEmpty()) << "it went on from its checkpoint";
  const Printed there = printed_by(folder, "there"), beside = printed_by(folder, "beside");
  EXPECT_THAT(there.text, HasSubstr("device of the first: sim:0"));
  EXPECT_THAT(beside.text, HasSubstr(" (on the host, beside it), activations"));
  EXPECT_THAT(there.text, Not(HasSubstr("on the host")));
  EXPECT_GT(beside.peak_mib, 0);
  EXPECT_LT(beside.peak_mib, there.peak_mib) << "parts, their gradients and states are not on the device";
  fs::remove_all(folder);
}

TEST(ShardFully, AGptOnADeviceTrainsAsOnTheCpuWithItsPartsThereOrOnTheHost) { expect_the_same_on_a_device("gpt"); }
TEST(ShardFully, ABertOnADeviceTrainsAsOnTheCpuWithItsPartsThereOrOnTheHost) { expect_the_same_on_a_device("bert"); }

}  // namespace
}  // namespace chorale::app
