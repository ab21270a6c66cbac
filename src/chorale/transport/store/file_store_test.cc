#include "chorale/transport/store/file_store.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/transport/store/store_kinds_test_util.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

class FileStoreTest : public testing::Test {
 protected:
  ScratchFolder folder_;
  const std::string path_ = folder_.path("store");
};

TEST_F(FileStoreTest, WhatWasSetOutlivesTheStore) {
  { FileStore(path_).set("a", "x", within(5s)); }
  FileStore later(path_);
  EXPECT_EQ(later.get("a", within(5s)), "x");
  EXPECT_FALSE(later.remove_file_if("a", "another value", within(5s)));
  EXPECT_TRUE(std::filesystem::exists(path_));
  EXPECT_TRUE(later.remove_file_if("a", "x", within(5s)));
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_THROW(later.set("b", "y", within(5s)), StoreLost);  // the others would not see it
}

TEST_F(FileStoreTest, OthersCannotReadIt) {
  FileStore store(path_);
  struct stat state {};
  ASSERT_EQ(stat(path_.c_str(), &state), 0);
  EXPECT_EQ(state.st_mode & 0777U, 0600U);
}

TEST_F(FileStoreTest, ARecordCutShortByADeadWriterDoesNotCount) {
  FileStore store(path_);
  store.set("a", "first", within(5s));
  const auto first = std::filesystem::file_size(path_);
  store.set("b", "second", within(5s));
  const auto both = std::filesystem::file_size(path_);
  for (auto size = first; size < both; ++size) {
    const std::string cut = folder_.path(std::to_string(size));
    std::filesystem::copy_file(path_, cut);
    std::filesystem::resize_file(cut, size);
    FileStore survivor(cut);
    EXPECT_EQ(survivor.count(within(5s)), 1) << size;
    survivor.set("c", "third", within(5s));
    EXPECT_EQ(survivor.get("c", within(5s)), "third") << size;
    EXPECT_EQ(FileStore(cut).count(within(5s)), 2) << size;
  }
}

TEST_F(FileStoreTest, AFileThatIsNoStoreIsLeftAlone) {
  std::ofstream(path_) << "my thesis, in one copy";
  EXPECT_THROW(FileStore(path_).set("a", "x", within(5s)), InvalidArgument);
  std::ifstream file(path_);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "my thesis, in one copy");
}

TEST_F(FileStoreTest, ADamagedLengthIsAnErrorThatSaysWhere) {
  FileStore(path_).set("a", "x", within(5s));
  std::fstream(path_, std::ios::in | std::ios::out).seekp(16).write("\xff\xff\xff\x7f", 4);
  try {
    FileStore(path_).count(within(5s));
    FAIL();
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("damaged at byte 16"));
  }
}

TEST_F(FileStoreTest, ARankThatStopsWithTheLockDelaysOthersUntilTheirDeadlineOnly) {
  FileStore store(path_);
  const int other = open(path_.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(flock(other, LOCK_EX), 0);
  EXPECT_THROW(store.set("a", "x", within(50ms)), CommError);
  ASSERT_EQ(flock(other, LOCK_UN), 0);
  store.set("a", "x", within(5s));
  close(other);
}

TEST_F(FileStoreTest, AMissingFolderIsAnErrorThatNamesThePath) {
  EXPECT_THROW(FileStore(folder_.path("none/store")), InvalidArgument);
}

}  // namespace
}  // namespace chorale::transport
