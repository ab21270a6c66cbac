// Saves and loads that fail: disks, damage, ranks that throw or die.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>

#include "chorale/api/api.h"
#include "chorale/base/comm_error.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/snapshot/async_saver.h"
#include "chorale/snapshot/snapshot.h"
#include "chorale/snapshot/snapshot_test_util.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::snapshot {
namespace {

namespace fs = std::filesystem;

TEST(Checkpoint, AFailedSaveLeavesTheOldOneAndMakesNoNewOne) {
  const TemporaryFolder folder;
  save(folder / "old", state_of({{"a", numbered({4})}}));
  const auto fail_late = [](Step step) {
    if (step == Step::kIndex) throw std::runtime_error("the power went off");
  };
  for (const char* name : {"old", "new"})
    EXPECT_THROW(save(folder / name, state_of({{"a", numbered({4}, 9)}}), {.on_step = fail_late}), CheckpointError);
  EXPECT_EQ(read(folder / "old").chunks[0].local.to_vector<float>()[0], 0);
  EXPECT_TRUE(verify(folder / "old").empty());
  EXPECT_FALSE(has_checkpoint(folder / "new"));
  EXPECT_NE(message_of<InvalidArgument>([&] { read(folder / "new"); }).find("there is no checkpoint in"),
            std::string::npos);
}

TEST(Checkpoint, DamageIsFound) {
  const TemporaryFolder folder;
  save(folder / "one", state_of({{"a", numbered({64})}, {"b", numbered({64})}}));
  const std::string name = read_index(folder / "one").files.begin()->first;
  std::string content = folder.read("one/" + name);
  content[content.size() - 5] ^= 1;
  folder.write("one/" + name, content);
  const auto problems = verify(folder / "one");
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_NE(problems[0].find(" is damaged: the checksum of "), std::string::npos) << problems[0];
  EXPECT_NE(message_of<CheckpointError>([&] { read(folder / "one"); }).find("is damaged"), std::string::npos);
  folder.write("one/" + name, content.substr(0, content.size() - 1));
  EXPECT_NE(verify(folder / "one").at(0).find("is damaged: it has "), std::string::npos);
}

// While it lives, files cannot grow beyond so many bytes: what a full disk does to a write.
class SmallFiles {
 public:
  explicit SmallFiles(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit smaller{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &smaller);
  }
  ~SmallFiles() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  SmallFiles(const SmallFiles&) = delete;
  SmallFiles& operator=(const SmallFiles&) = delete;

 private:
  void (*handler_)(int);
  rlimit before_{};
};

TEST(Checkpoint, ASaveThatCannotBeWrittenLeavesTheOneBeforeAndNamesFilesAndRanks) {
  const Tensor x = numbered({64, 64});
  const TemporaryFolder folder;
  std::string messages[2];
  comm::run_ranks(2, [&](comm::Group& group) {
    const State state{{chunk_of("x", x, shard(x.sizes(), 0, 2, group.rank()))}, {}};
    save(group, folder / "all", state);
    save(group, folder / "next", state);  // whatever it needs beside files is there now
    group.barrier().wait();
    std::optional<SmallFiles> full;
    if (group.rank() == 0) full.emplace(4096);
    group.barrier().wait();
    // Both fail: what goes into the same folder, and into another one.
    messages[group.rank()] = message_of<CheckpointError>([&] { save(group, folder / "all", state); });
    EXPECT_THROW(save(group, folder / "third", state), CheckpointError);
    group.barrier().wait();
    full.reset();
    group.barrier().wait();
    State loaded{{empty_chunk("x", x.sizes(), shard(x.sizes(), 0, 2, group.rank()))}, {}};
    load(group, folder / "all", loaded);
    expect_part(loaded.chunks[0], x);
    save(group, folder / "all", state, {.replaced = Replaced::kRemoved});  // and then it can be written again
  });
  for (const std::string& message : messages) {
    EXPECT_NE(message.find("writing failed on ranks 0, 1"), std::string::npos) << message;
    for (const char* file : {"rank-0-", "rank-1-", "all/", "File too large"})
      EXPECT_NE(message.find(file), std::string::npos) << file << " in " << message;
  }
  EXPECT_TRUE(verify(folder / "all").empty());
  EXPECT_FALSE(has_checkpoint(folder / "third"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder / "all"), {}), 3) << "two files and the index";
}

TEST(Checkpoint, AChunkThatIsDamagedWhileOthersWriteIsNamedWithItsFileAndRank) {
  const Tensor x = numbered({64, 64});
  const TemporaryFolder folder;
  comm::run_ranks(2, [&](comm::Group& group) {
    const State state{{chunk_of("w", x, shard(x.sizes(), 1, 2, group.rank())),
                       chunk_of("x", x, shard(x.sizes(), 0, 2, group.rank()))},
                      {{"step", "7"}}};
    save(group, folder / "before", state);
    // A part is damaged after the ranks' files were written, and before the index is.
    save(group, folder / "after", state, {.on_step = [&](Step step) {
           if (step != Step::kIndex || group.rank() != 1) return;
           for (const auto& entry : fs::directory_iterator(folder / "after")) {
             if (!entry.path().filename().string().starts_with("rank-1-")) continue;
             std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
             file.seekp(-5, std::ios::end);
             file.put('!');
           }
         }});
    State loaded{{empty_chunk("w", x.sizes(), shard(x.sizes(), 1, 2, group.rank())),
                  empty_chunk("x", x.sizes(), shard(x.sizes(), 0, 2, group.rank()))},
                 {{"step", "?"}}};
    const std::string message =
        message_of<CheckpointError>([&] { load(group, folder / "after", loaded, {.verify = Verify::kFirst}); });
    // Nothing was replaced, neither what was read before the damage nor on the other rank.
    for (const TensorChunk& chunk : loaded.chunks)
      EXPECT_EQ(chunk.local.to_vector<float>(), std::vector<float>(64 * 32, -1)) << chunk.key;
    EXPECT_EQ(loaded.bytes.at("step"), "?");
    EXPECT_EQ(message_of<CheckpointError>([&] { load(group, folder / "after", loaded); }), message);
    EXPECT_NE(message.find("reading failed on rank 1; rank 1:"), std::string::npos) << message;
    EXPECT_NE(message.find("after/rank-1-"), std::string::npos) << message;
    EXPECT_NE(message.find("is damaged: the checksum of x"), std::string::npos) << message;
    for (const Verify verify : {Verify::kFirst, Verify::kMeanwhile, Verify::kNot}) {
      for (const TensorChunk& chunk : loaded.chunks) fill_(chunk.local, -1);
      load(group, folder / "before", loaded, {.verify = verify});
      for (const TensorChunk& chunk : loaded.chunks) expect_part(chunk, x);
    }
    EXPECT_EQ(loaded.bytes.at("step"), "7");
  });
  EXPECT_EQ(verify(folder / "after").size(), 1u);
  EXPECT_TRUE(verify(folder / "before").empty());
}

// spec: test_save_error_handling, test_load_error_handling
TEST(Checkpoint, AFailureAnywhereIsThrownEverywhereWithTheRanksThatFailed) {
  const TemporaryFolder folder;
  const std::map<int, std::string> expected{{1, "no"}, {3, "no"}};
  const auto fail_at = [](const comm::Group& group, Step at) {
    return [rank = group.rank(), at](Step step) {
      if (step == at && rank % 2 == 1) throw std::runtime_error("no");
    };
  };
  const auto failures = [](auto call) {
    try {
      call();
    } catch (const CheckpointError& error) {
      return error.failures();
    }
    return std::map<int, std::string>{};
  };
  comm::run_ranks(4, [&](comm::Group& group) {
    State state = state_of({{"a", numbered({4})}});
    save(group, folder / "good", state);
    AsyncSaver saver(group);
    for (int coordinator = 0; coordinator < 4; ++coordinator) {
      for (const Step step : {Step::kPrepare, Step::kPlan, Step::kAgree, Step::kWrite, Step::kIndex}) {
        const SaveOptions options{.coordinator = coordinator, .on_step = fail_at(group, step)};
        EXPECT_EQ(failures([&] { save(group, folder / "bad", state, options); }), expected) << name_of(step);
        EXPECT_EQ(failures([&] {
                    saver.start(folder / "bad", state, options);
                    saver.wait();
                  }),
                  expected)
            << name_of(step);
      }
      save(group, folder / std::to_string(coordinator), state, {.coordinator = coordinator});
    }
    for (const Step step : {Step::kPrepare, Step::kPlan, Step::kRead}) {
      EXPECT_EQ(failures([&] { load(group, folder / "good", state, {.on_step = fail_at(group, step)}); }), expected)
          << name_of(step);
    }
    load(group, folder / "good", state);  // the group is as good as before
  });
  EXPECT_FALSE(has_checkpoint(folder / "bad"));
}

// spec: test_save_error_handling_no_dist, test_load_error_handling_no_dist
TEST(Checkpoint, AFailureOfTheOnlyProcessIsNamedToo) {
  const TemporaryFolder folder;
  State state = state_of({{"a", numbered({4})}});
  const auto fail = [](Step) { throw std::runtime_error("no"); };
  EXPECT_EQ(message_of<CheckpointError>([&] { save(folder / "one", state, {.on_step = fail}); }),
            "[checkpoint] preparing failed on rank 0; rank 0: no");
  save(folder / "one", state);
  EXPECT_EQ(message_of<CheckpointError>([&] { load(folder / "one", state, {.on_step = fail}); }),
            "[checkpoint] preparing failed on rank 0; rank 0: no");
}

// spec: x_crash_before_metadata
TEST(Checkpoint, ARankThatIsKilledWhileItWritesLeavesTheCheckpointBefore) {
  // A folder that all processes of this test know.
  const pid_t parent = comm::is_rank_process() ? ::getppid() : ::getpid();
  const fs::path folder = fs::temp_directory_path() / concat("chorale-killed-", parent);
  const auto ended = comm::run_processes(2, [&](comm::Group& group) {
    State state = state_of({{"a", numbered({4})}, {"b", numbered({4}, 5)}});
    save(group, folder / "before", state);
    fill_(state.chunks[0].local, 9);
    const auto die = [&](Step step) {
      if (step == Step::kWrite && group.rank() == 1) ::raise(SIGKILL);
    };
    // The survivor, which has written its part of the new one by then, is told.
    for (const char* name : {"new", "before"})
      EXPECT_THROW(save(group, folder / name, state, {.on_step = die}), CommError);
  });
  EXPECT_EQ(ended, (std::vector<int>{0, -SIGKILL}));
  EXPECT_EQ(read(folder / "before").chunks[0].local.to_vector<float>(), (std::vector<float>{0, 1, 2, 3}));
  EXPECT_TRUE(verify(folder / "before").empty());
  EXPECT_FALSE(has_checkpoint(folder / "new"));
  EXPECT_THROW(read(folder / "new"), InvalidArgument);
  fs::remove_all(folder);
}

TEST(Checkpoint, AnIndexIsNotTrusted) {
  const TemporaryFolder folder;
  save(folder / "one", state_of({{"a", numbered({4})}}));
  const std::string good = folder.read("one/index.json");
  const auto message = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    return message_of<InvalidArgument>([&] { parse_index("index.json", text); });
  };
  EXPECT_NE(message("checkpoint 1", "checkpoint 9").find("has the format"), std::string::npos);
  EXPECT_NE(message("\"sizes\": [4]", "\"sizes\": [5]").find("reaches beyond"), std::string::npos);
  EXPECT_NE(message("\"sizes\": [4]", "\"sizes\": [3]").find("elements together"), std::string::npos);
  EXPECT_NE(message("\"sizes\": [4]", "\"sizes\": [-4]").find("sizes"), std::string::npos);
  EXPECT_NE(message("\"f32\"", "\"f33\"").find("f33"), std::string::npos);
}

}  // namespace
}  // namespace chorale::snapshot
