// The folder of a run: whether it can be one, which process trains in it, and which options it has.
#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "chorale/train/option_table.h"

namespace chorale::train {

// InvalidArgument unless the path is a folder, or nothing yet where a folder can be made.
void check_can_be_folder(const std::filesystem::path& path);

// InvalidArgument when there is a run in the folder already, or a part of one: a new run would write over it.
void check_is_new(const std::filesystem::path& folder);

// InvalidArgument when there are folders in the folder, other than hidden ones and that of the logs: it is that of
// something else, such as / or runs. Files alone may be notes, options or the job's own output.
void check_has_no_folders(const std::filesystem::path& folder, const std::filesystem::path& logs);

// InvalidArgument when a file of the run that goes on is a symbolic link: writing it would change somebody's file.
void check_has_no_links(const std::filesystem::path& folder);

// Folders that were made for a run. When it ends, those that are still empty go: a run that fails before it begins
// leaves nothing. What was there before is never removed.
class MadeFolders {
 public:
  MadeFolders() = default;
  ~MadeFolders();
  MadeFolders(const MadeFolders&) = delete;
  MadeFolders& operator=(const MadeFolders&) = delete;

  // Makes the folder, with those above it.
  void make(const std::filesystem::path& folder);
  // Does what make() does, but only if it was not there: false when it was.
  bool make_new(const std::filesystem::path& folder);
  // Makes runs/TASK-1, or the one with the next number that is free: at once, so that nobody else takes it.
  std::string make_numbered(const std::string& task);

 private:
  std::vector<std::filesystem::path> made_;  // from the outermost
};

// One process at a time trains in a folder. The kernel's lock on the file `.lock` decides, which ends with its owner;
// the file itself only says which process that is.
class RunLock {
 public:
  // Waits a little, since an owner that was killed, as a rank is whose launcher was, may still be about to end; then
  // StateError that names the owner. Where the file system has no locks it warns, and there is none.
  explicit RunLock(const std::filesystem::path& folder, std::chrono::seconds patience = std::chrono::seconds(3));
  // Removes the file.
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  // What the owner of a folder's lock says of itself, "process 123 on HOST, …"; empty where nobody has it.
  static std::string owner(const std::filesystem::path& folder);

 private:
  std::filesystem::path path_;
  int file_ = -1;
};

// The options of the run in a folder. What its last checkpoint was trained with rules; config.json, which may be newer,
// counts for options that may change. Nothing when there is neither.
struct RunOptions {
  json::Object values;
  std::vector<std::string> differences;  // what config.json says otherwise, in words
};
std::optional<RunOptions> options_of_run(const std::filesystem::path& folder, const OptionTable& table);

}  // namespace chorale::train
