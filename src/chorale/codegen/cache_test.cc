// The cache of compiled code and the compiler behind it, with everything that can go wrong.
#include "chorale/codegen/cache.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <thread>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/codegen/fused.h"
#include "chorale/testing/environment_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::codegen {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

KernelText constant_function(int value) {
  const std::string name = "answer" + std::to_string(value);
  return {name, "int " + name + "(void) { return " + std::to_string(value) + "; }\n"};
}

// What the function of this number returns, or -1 where it could not be made.
int call(CodeCache& cache, int value, const Toolchain& toolchain = find_toolchain(), std::string* why = nullptr) {
  std::string ignored;
  const auto kernels = cache.get(toolchain, "// nothing\n", {constant_function(value)}, why ? *why : ignored);
  return kernels.empty() ? -1 : reinterpret_cast<int (*)()>(kernels[0].address)();
}

// A program in place of the compiler.
Toolchain script(const TemporaryFolder& folder, const std::string& name, const std::string& text) {
  const fs::path path = folder.write(name, "#!/bin/sh\n" + text);
  fs::permissions(path, fs::perms::owner_all);
  return find_toolchain(path.string());
}

std::vector<fs::path> entries(const fs::path& folder) {
  std::vector<fs::path> found;
  for (const fs::directory_entry& at : fs::directory_iterator(folder / "code")) found.push_back(at.path());
  return found;
}

void expect_counts(const CodeCache& cache, int64_t hit, int64_t miss, int64_t bypass) {
  const CacheCounts counts = cache.counts();
  EXPECT_EQ(counts.hit, hit);
  EXPECT_EQ(counts.miss, miss);
  EXPECT_EQ(counts.bypass, bypass);
}

TEST(CodeCache, CompilesOnceAndFindsItOnDisk) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path()});
  EXPECT_EQ(call(cache, 7), 7);
  expect_counts(cache, 0, 1, 0);
  EXPECT_EQ(call(cache, 7), 7);
  expect_counts(cache, 1, 1, 0);
  cache.forget();
  EXPECT_EQ(call(cache, 7), 7);
  expect_counts(cache, 2, 1, 0);
  CodeCache other({.folder = folder.path()});
  EXPECT_EQ(call(other, 7), 7);
  expect_counts(other, 1, 0, 0);
  EXPECT_EQ(call(other, 8), 8);
  expect_counts(other, 1, 1, 0);
  struct stat about {};
  ASSERT_EQ(::stat((folder / "code").c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0777, 0700u);
  for (const fs::path& entry : entries(folder.path())) {
    ASSERT_EQ(::stat(entry.c_str(), &about), 0);
    EXPECT_EQ(about.st_mode & 0777, 0600u) << entry;
  }
}

TEST(CodeCache, TellsToolchainsApart) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path()});
  Toolchain other = find_toolchain();
  other.flags.emplace_back("-DOTHER");
  EXPECT_EQ(call(cache, 7), 7);
  EXPECT_EQ(call(cache, 7, other), 7);
  expect_counts(cache, 0, 2, 0);
}

// Whatever was done to an entry, it is not executed: it is made again, and then found.
TEST(CodeCache, MakesDamagedAndForeignEntriesAgain) {
  const TemporaryFolder folder;
  struct Damage {
    const char* name;
    void (*damage)(const fs::path& entry, const fs::path& other);
  };
  const Damage damages[] = {
      {"truncated", [](const fs::path& entry, const fs::path&) { fs::resize_file(entry, fs::file_size(entry) / 2); }},
      {"empty", [](const fs::path& entry, const fs::path&) { fs::resize_file(entry, 0); }},
      {"one byte changed",
       [](const fs::path& entry, const fs::path&) {
         std::fstream file(entry, std::ios::in | std::ios::out | std::ios::binary);
         file.seekp(static_cast<std::streamoff>(fs::file_size(entry) / 2));
         file.put('\x5a');
       }},
      {"another entry under its name",
       [](const fs::path& entry, const fs::path& other) {
         fs::copy_file(other, entry, fs::copy_options::overwrite_existing);
         fs::permissions(entry, fs::perms::owner_read | fs::perms::owner_write);
       }},
      {"a link to a good one",
       [](const fs::path& entry, const fs::path& other) {
         fs::rename(entry, entry.parent_path() / "elsewhere");
         fs::create_symlink(entry.parent_path() / "elsewhere", entry);
         (void)other;
       }},
      {"others may write to it",
       [](const fs::path& entry, const fs::path&) { fs::permissions(entry, fs::perms::all); }},
      {"a pipe",
       [](const fs::path& entry, const fs::path&) {
         fs::remove(entry);
         ASSERT_EQ(::mkfifo(entry.c_str(), 0600), 0);
       }},
      {"not ours",
       [](const fs::path& entry, const fs::path&) {
         // Only root can give a file away; for others it is gone, which must do no harm either.
         if (::chown(entry.c_str(), 12345, 12345) != 0) fs::remove(entry);
       }},
  };
  int value = 100;
  for (const Damage& damage : damages) {
    SCOPED_TRACE(damage.name);
    const TemporaryFolder own;
    CodeCache first({.folder = own.path()});
    ASSERT_EQ(call(first, value), value);
    const fs::path entry = entries(own.path()).at(0);
    const fs::path kept = folder / std::to_string(value);
    ASSERT_EQ(call(first, value + 1), value + 1);
    for (const fs::path& at : entries(own.path())) {
      if (at != entry) fs::copy_file(at, kept);
    }
    damage.damage(entry, kept);
    CodeCache second({.folder = own.path()});
    EXPECT_EQ(call(second, value), value);
    expect_counts(second, 0, 1, 0);
    CodeCache third({.folder = own.path()});
    EXPECT_EQ(call(third, value), value);
    expect_counts(third, 1, 0, 0);
    value += 2;
  }
}

TEST(CodeCache, WithoutAFolderThatCanBeTrustedItKeepsCodeInMemory) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "code");
  fs::permissions(folder / "code", fs::perms::all);
  CodeCache open_to_all({.folder = folder.path()});
  EXPECT_EQ(call(open_to_all, 7), 7);
  EXPECT_EQ(call(open_to_all, 7), 7);
  expect_counts(open_to_all, 1, 0, 1);
  EXPECT_TRUE(entries(folder.path()).empty());

  const EnvironmentVariable no_home("HOME", nullptr), no_cache("XDG_CACHE_HOME", nullptr),
      no_folder("CHORALE_CACHE_DIR", nullptr);
  CodeCache homeless;
  EXPECT_EQ(call(homeless, 7), 7);
  EXPECT_EQ(call(homeless, 7), 7);
  expect_counts(homeless, 1, 0, 1);
}

TEST(CodeCache, AFullDiskCostsTheEntryOnly) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path()});
  ASSERT_EQ(call(cache, 1), 1);
  // Files may be as long as the code and no longer: an entry, which has a digest too, does not fit. The compiler is a
  // process of its own, which may write more.
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
  const Toolchain unlimited = script(folder, "cc", "ulimit -f unlimited; exec cc \"$@\"\n");
  const rlimit small{fs::file_size(entries(folder.path())[0]) - 40, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const int got = call(cache, 2, unlimited);
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, ignored);
  EXPECT_EQ(got, 2);
  // Nothing half-written is left, and later it works.
  EXPECT_EQ(entries(folder.path()).size(), 1u);
  EXPECT_EQ(call(cache, 2), 2);
}

TEST(CodeCache, StaysWithinItsLimit) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path(), .most_bytes = 40'000});
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(call(cache, i), i);
    uintmax_t sum = 0;
    for (const fs::path& entry : entries(folder.path())) sum += fs::file_size(entry);
    EXPECT_LE(sum, 40'000u);
  }
  EXPECT_FALSE(entries(folder.path()).empty());
}

TEST(CodeCache, CompilerThatIsMissingFailsOrIsKilled) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path()});
  std::string why;
  EXPECT_EQ(call(cache, 1, find_toolchain("/nowhere/cc"), &why), -1);
  EXPECT_NE(why.find("there is no program /nowhere/cc"), std::string::npos) << why;
  EXPECT_EQ(call(cache, 1, script(folder, "failing", "echo 'no more registers' >&2; exit 3\n"), &why), -1);
  EXPECT_NE(why.find("failed with status 3: no more registers"), std::string::npos) << why;
  EXPECT_EQ(call(cache, 1, script(folder, "killed", "kill -9 $$\n"), &why), -1);
  EXPECT_NE(why.find("was ended by signal 9"), std::string::npos) << why;
  EXPECT_EQ(call(cache, 1, script(folder, "silent", "exit 0\n"), &why), -1);
  EXPECT_EQ(call(cache, 1, script(folder, "lying", "for last; do :; done; echo nonsense >\"$last\"\n"), &why), -1);
  EXPECT_NE(why.find("cannot be loaded"), std::string::npos) << why;
  expect_counts(cache, 0, 1, 0);  // the one that lied
  EXPECT_EQ(call(cache, 1), 1);
}

TEST(CodeCache, CompilerThatHangsIsEndedWithAllThatItStarted) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path(), .deadline = 300ms});
  std::string why;
  const fs::path child = folder / "child";
  EXPECT_EQ(call(cache, 1, script(folder, "hanging", "sleep 1000 & echo $! >" + child.string() + "; wait\n"), &why),
            -1);
  EXPECT_NE(why.find("took longer than 300 ms"), std::string::npos) << why;
  int pid = 0;
  std::ifstream(child) >> pid;
  ASSERT_GT(pid, 0);
  // Its parent has been ended too, so somebody else collects it: soon it is gone, or waits to be collected.
  for (int i = 0; i < 500; ++i) {
    std::ifstream status("/proc/" + std::to_string(pid) + "/stat");
    std::string number, name, state;
    if (!(status >> number >> name >> state) || state == "Z") return;
    std::this_thread::sleep_for(10ms);
  }
  FAIL() << "process " << pid << " goes on";
}

TEST(CodeCache, ManyCachesFillOneFolder) {
  const TemporaryFolder folder;
  std::vector<std::thread> threads;
  threads.reserve(3);
  std::atomic<int> wrong{0};
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      CodeCache cache({.folder = folder.path()});
      for (int i = 0; i < 3; ++i) wrong += call(cache, 50 + i) == 50 + i ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_EQ(entries(folder.path()).size(), 3u);
  CodeCache cache({.folder = folder.path()});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(call(cache, 50 + i), 50 + i);
  expect_counts(cache, 3, 0, 0);
}

// A graph whose kernels cannot be made runs op by op.
TEST(Fused, WithoutACompilerItRunsOpByOp) {
  const TemporaryFolder folder;
  CodeCache cache({.folder = folder.path()});
  auto f = compile([](const Tensor& x) { return relu(add(mul(x, 2), 1)); },
                   {.backend = fused({.compiler = "/nowhere/cc", .cache = &cache})});
  EXPECT_EQ(f(Tensor::from<float>({-3, 0.5f}, {2})).to_vector<float>(), (std::vector<float>{0, 2}));
  expect_counts(cache, 0, 0, 0);
}

}  // namespace
}  // namespace chorale::codegen
