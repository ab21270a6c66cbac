#include "chorale/io/append_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "chorale/base/error.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::io {
namespace {

constexpr size_t kRoom = 10'000;  // enough for what the test prints, which is a file too

// Files of this process end at so many bytes, as on a disk that is full there.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) : signal_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit now{.rlim_cur = bytes, .rlim_max = before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &now);
  }
  ~FullDisk() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, signal_);
  }

 private:
  void (*signal_)(int);
  rlimit before_{};
};

TEST(AppendFile, AFullDiskGetsWholeRecordsOrNoneAndTheRestWhenThereIsRoomAgain) {
  const TemporaryFolder folder;
  const std::string first(kRoom, 'x');
  AppendFile file(folder / "log");
  file.add(first);
  EXPECT_TRUE(file.flush());
  testing::internal::CaptureStderr();
  {
    const FullDisk disk(kRoom + 4);  // four bytes of the second line would still fit
    file.add("second line\n");
    EXPECT_FALSE(file.flush());
    EXPECT_EQ(folder.read("log"), first);
    file.add("third line\n");
    EXPECT_FALSE(file.flush());
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, testing::HasSubstr((folder / "log").string() + ": File too large"));
  EXPECT_EQ(said.find("cannot write"), said.rfind("cannot write")) << "one warning is enough";
  file.add("fourth line\n");
  EXPECT_TRUE(file.flush());
  EXPECT_EQ(folder.read("log"), first + "second line\nthird line\nfourth line\n");
  EXPECT_FALSE(file.has_lost());
}

TEST(AppendFile, WhatIsLostInTheEndIsSaid) {
  const TemporaryFolder folder;
  const std::string before(kRoom, 'x');
  folder.write("log", before);
  testing::internal::CaptureStderr();
  {
    const FullDisk disk(kRoom);
    AppendFile file(folder / "log");
    file.add("a line\n");
  }
  EXPECT_THAT(testing::internal::GetCapturedStderr(), testing::HasSubstr("lacks 7 bytes"));
  EXPECT_EQ(folder.read("log"), before);
}

TEST(AppendFile, GoesOnBehindWhatIsThere) {
  const TemporaryFolder folder;
  folder.write("log", "old\n");
  {
    AppendFile file(folder / "log");
    file.add("new\n");
  }
  EXPECT_EQ(folder.read("log"), "old\nnew\n");
}

TEST(AppendFile, APipeIsRefused) {
  const TemporaryFolder folder;
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_THROW(AppendFile(folder / "pipe"), InvalidArgument);
  EXPECT_THROW(AppendFile(folder.path()), InvalidArgument);
}

}  // namespace
}  // namespace chorale::io
