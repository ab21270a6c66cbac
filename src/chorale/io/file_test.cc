#include "chorale/io/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::io {
namespace {

size_t files_in(const TemporaryFolder& folder) {
  const std::filesystem::directory_iterator all(folder.path());
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

TEST(MappedFile, ShowsTheContentAndKeepsItWhenTheFileIsReplaced) {
  const TemporaryFolder folder;
  const auto path = folder.write("a", "old content");
  const auto file = MappedFile::open(path);
  EXPECT_EQ(file->text(), "old content");
  AtomicFile next(path);
  next.write("new");
  next.commit();
  EXPECT_EQ(file->text(), "old content");
  EXPECT_EQ(MappedFile::open(path)->text(), "new");
}

TEST(MappedFile, OfAnEmptyFileIsEmpty) {
  const TemporaryFolder folder;
  EXPECT_TRUE(MappedFile::open(folder.write("a", ""))->bytes().empty());
}

TEST(MappedFile, NamesWhatCannotBeRead) {
  const TemporaryFolder folder;
  const auto error_of = [](const std::filesystem::path& path) -> std::string {
    return message_of([&] { MappedFile::open(path); });
  };
  EXPECT_THAT(error_of(folder / "none"), testing::HasSubstr("none\": No such file"));
  EXPECT_THAT(error_of(folder.path()), testing::HasSubstr("it is not a regular file"));
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(error_of(folder / "pipe"), testing::HasSubstr("it is not a regular file"));
}

TEST(AtomicFile, LeavesNothingWithoutCommit) {
  const TemporaryFolder folder;
  folder.write("a", "old");
  {
    AtomicFile file(folder / "a");
    file.write("new");
    EXPECT_EQ(folder.read("a"), "old");
    EXPECT_EQ(files_in(folder), 2u);
  }
  EXPECT_EQ(folder.read("a"), "old");
  EXPECT_EQ(files_in(folder), 1u);
}

TEST(AtomicFile, HasOrdinaryPermissions) {
  const TemporaryFolder folder;
  AtomicFile file(folder / "a");
  file.commit();
  struct stat status {};
  ASSERT_EQ(::stat((folder / "a").c_str(), &status), 0);
  const mode_t mask = ::umask(0);
  ::umask(mask);
  EXPECT_EQ(status.st_mode & 0777, 0666 & ~mask);
}

TEST(AtomicFile, RefusesFoldersThatAreNotThere) {
  const TemporaryFolder folder;
  EXPECT_THROW(AtomicFile(folder / "none" / "a"), InvalidArgument);
  EXPECT_THROW(AtomicFile(folder.path() / ""), InvalidArgument);
}

TEST(AtomicFile, KeepsTheOldFileWhenTheSystemRefusesToWriteMore) {
  const TemporaryFolder folder;
  folder.write("a", "old");
  // A limit on the size of files stands for a full disk.
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1000, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  try {
    AtomicFile file(folder / "a");
    EXPECT_THROW(file.write(std::string(5000, 'x')), StateError);
  } catch (const Error& error) {
    ADD_FAILURE() << error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(folder.read("a"), "old");
  EXPECT_EQ(files_in(folder), 1u);
}

TEST(AtomicFile, WritesOverASpareThatNobodyElseHas) {
  const TemporaryFolder folder;
  struct stat before {};
  struct stat after {};
  const auto write_with = [&](const char* spare, std::string_view text) {
    AtomicFile file(folder / "a", folder / spare);
    file.write(text);
    file.commit();
    EXPECT_FALSE(std::filesystem::exists(folder / spare)) << "it is gone in any case";
    EXPECT_EQ(folder.read("a"), text);
    EXPECT_EQ(::stat((folder / "a").c_str(), &after), 0);
  };
  for (const char* text : {"longer", "short, or not", ""}) {
    folder.write("spare", "nine bytes");
    ASSERT_EQ(::stat((folder / "spare").c_str(), &before), 0);
    write_with("spare", text);
    EXPECT_EQ(after.st_ino, before.st_ino);
  }
  // Mapped, under two names, a link, no file, none at all.
  const auto mapped = MappedFile::open(folder.write("spare", "mapped"));
  write_with("spare", "1");
  EXPECT_EQ(mapped->text(), "mapped");
  folder.write("spare", "two names");
  std::filesystem::create_hard_link(folder / "spare", folder / "other");
  write_with("spare", "2");
  EXPECT_EQ(folder.read("other"), "two names");
  std::filesystem::create_symlink(folder / "other", folder / "spare");
  write_with("spare", "3");
  EXPECT_EQ(folder.read("other"), "two names");
  write_with("none", "4");
  // Without commit() nothing is left of either.
  folder.write("spare", "gone");
  {
    AtomicFile file(folder / "a", folder / "spare");
    file.write("x");
  }
  EXPECT_EQ(folder.read("a"), "4");
  EXPECT_EQ(files_in(folder), 2u) << "a and other";
}

TEST(RenameDurably, MovesAFolderWithItsFilesAndNeverOverAnother) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "a");
  write_file(folder / "a" / "x", "text");
  rename_durably(folder / "a", folder / "b");
  EXPECT_EQ(folder.read("b/x"), "text");
  std::filesystem::create_directory(folder / "c");
  EXPECT_THROW(rename_durably(folder / "c", folder / "b"), StateError);
  EXPECT_EQ(folder.read("b/x"), "text");
}

TEST(AtomicFile, ReplacesNothingButRegularFiles) {
  const TemporaryFolder folder;
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink(folder / "nowhere", folder / "dangling");
  std::filesystem::create_directory(folder / "folder");
  for (const char* name : {"pipe", "dangling", "folder"}) {
    EXPECT_THROW(write_file(folder / name, "text"), InvalidArgument) << name;
  }
  EXPECT_THROW(write_file("/dev/null", "text"), InvalidArgument);
  EXPECT_TRUE(std::filesystem::is_fifo(folder / "pipe"));
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "dangling"));
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

TEST(AtomicFile, ALinkAndTheFileBehindItStayAsTheyAre) {
  const TemporaryFolder folder;
  folder.write("file", "old");
  std::filesystem::create_symlink("file", folder / "link");
  EXPECT_EQ(
      message_of([&] { write_file(folder / "link", "new"); }),
      concat("cannot write ", folder / "link",
             ": it is a symbolic link to \"file\"; nothing was changed. Remove the link, or name the file itself"));
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(folder.read("file"), "old");
}

}  // namespace
}  // namespace chorale::io
