#include "chorale/train/run_folder.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/io/file.h"
#include "chorale/io/no_link.h"
#include "chorale/json/json_write.h"
#include "chorale/train/checkpoint.h"

namespace chorale::train {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostConfigBytes = 10'000'000;
// All that a run would write over, or remove with its own old checkpoints.
constexpr const char* kWritten[] = {"config.json", "metrics.jsonl", "checkpoints", "report.html", "trace.json"};
std::string about_this_process() {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  const auto now = std::chrono::time_point_cast<std::chrono::seconds>(std::chrono::system_clock::now());
  return fmt::format("process {} on {}, since {:%Y-%m-%d %H:%M:%S} UTC\n", ::getpid(), host, now);
}

// What a lock's owner wrote about itself, as far as it can be printed.
std::string owner_in(int file) {
  char text[300];
  const ssize_t size = ::pread(file, text, sizeof text, 0);
  const std::string_view all(text, static_cast<size_t>(std::max<ssize_t>(size, 0)));
  const std::string_view line = all.substr(0, all.find('\n'));
  const bool printable = std::all_of(line.begin(), line.end(), [](char c) { return c >= ' ' && c < 127; });
  return line.empty() || !printable ? "a process that has not said which" : std::string(line);
}

// The name may have been given to another file meanwhile: an owner removes it when it ends.
bool is_named(int file, const fs::path& path) {
  struct stat opened {
  }, named{};
  return ::fstat(file, &opened) == 0 && ::stat(path.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
         opened.st_dev == named.st_dev;
}

bool has_no_locks(int error) {
  return error == EOPNOTSUPP || error == ENOLCK || error == ENOSYS || error == EINVAL || error == EBADF;
}

json::Value read_config(const fs::path& path) {
  const auto file = io::MappedFile::open(path);
  json::Value value = json::parse(path.string(), file->text(), {.bytes = kMostConfigBytes});
  value.object(path.string());
  return value;
}

}  // namespace

void check_can_be_folder(const fs::path& path) {
  CHORALE_CHECK(!path.empty() && path.native().find('\0') == std::string::npos, "[train] --out names no folder");
  std::error_code error;
  fs::path part = fs::absolute(path, error);
  CHORALE_CHECK(!error, "[train] --out ", path.string(), ": the working folder is not there: ", error.message());
  for (;; part = part.parent_path()) {
    const fs::file_status status = fs::status(part, error);
    if (fs::is_directory(status)) return;
    // A link that leads nowhere exists, too, and no folder can be made in its place.
    const bool is_there = fs::exists(fs::symlink_status(part, error));
    CHORALE_CHECK(
        !is_there && (status.type() == fs::file_type::not_found || !error), "[train] --out ", path.string(),
        " must be a folder, or become one, but ", part.string(),
        is_there ? " is something else; nothing was changed" : concat(" cannot be looked at: ", error.message()));
    if (part == part.parent_path()) return;
  }
}

void check_is_new(const fs::path& folder) {
  for (const char* name : kWritten) {
    std::error_code ignored;
    CHORALE_CHECK(!fs::exists(fs::symlink_status(folder / name, ignored)), "[train] there is a run in ",
                  folder.string(), " already: it has ", name,
                  "; go on with it by --resume (which needs its config.json or a checkpoint), or choose another "
                  "folder with --out");
  }
}

void check_has_no_folders(const fs::path& folder, const fs::path& logs) {
  std::error_code error;
  const fs::path own = fs::absolute(folder, error).lexically_normal() / "";
  const fs::path inside =
      logs.empty() ? fs::path() : fs::absolute(logs, error).lexically_normal().lexically_relative(own);
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    const bool is_known = name.starts_with('.') || name == "lost+found" || (!inside.empty() && *inside.begin() == name);
    CHORALE_CHECK(is_known || !fs::is_directory(entry.symlink_status(error)), "[train] --out ", folder.string(),
                  " is not a run's folder: it holds another folder, ", name,
                  "; choose one that is empty or not there yet, such as --out ", (folder / "run-1").string());
  }
}

void check_has_no_links(const fs::path& folder) {
  for (const std::string name : kWritten) {
    if (name != "checkpoints") io::check_is_no_link(folder / name);  // which may be on another disk
  }
}

bool MadeFolders::make_new(const fs::path& folder) {
  if (const fs::path above = folder.parent_path(); !above.empty()) make(above);
  if (::mkdir(folder.c_str(), 0777) == 0) {
    made_.push_back(folder);
    return true;
  }
  CHORALE_CHECK(errno == EEXIST, "[train] cannot make the folder ", folder.string(), ": ", std::strerror(errno));
  return false;
}

std::string MadeFolders::make_numbered(const std::string& task) {
  for (int number = 1;; ++number) {
    const fs::path path = fs::path("runs") / concat(task, "-", number);
    if (make_new(path)) return path.string();
  }
}

void MadeFolders::make(const fs::path& folder) {
  std::error_code ignored;
  if (folder.empty() || fs::is_directory(folder, ignored)) return;
  if (!folder.has_filename()) return make(folder.parent_path());  // of "runs/a/"
  CHORALE_CHECK(make_new(folder) || fs::is_directory(folder, ignored), "[train] ", folder.string(),
                " is not a folder; nothing was changed");
}

MadeFolders::~MadeFolders() {
  for (auto folder = made_.rbegin(); folder != made_.rend(); ++folder) ::rmdir(folder->c_str());
}

RunLock::RunLock(const fs::path& folder, std::chrono::seconds patience) : path_(folder / ".lock") {
  const auto until = std::chrono::steady_clock::now() + patience;
  for (;;) {
    file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    CHORALE_CHECK(file_ >= 0, "[train] cannot write ", path_.string(), ": ", std::strerror(errno));
    const int error = ::flock(file_, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    if (error == 0 && is_named(file_, path_)) break;
    if (error != 0 && has_no_locks(error)) {
      log_warning(concat("the file system of ", folder.string(), " has no locks (", std::strerror(error),
                         "): nothing keeps two jobs from training in it at once"));
      break;
    }
    const std::string owner = error != 0 ? owner_in(file_) : "";
    ::close(file_);
    file_ = -1;
    CHORALE_CHECK_STATE(error == 0 || error == EINTR || std::chrono::steady_clock::now() < until,
                        "[train] a job is training in ", folder.string(), " already: ", owner,
                        "; wait for its end, or choose another folder with --out");
    if (error != 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  const std::string text = about_this_process();
  // Only for people: where the disk is full, the lock holds all the same.
  if (::ftruncate(file_, 0) != 0 || ::pwrite(file_, text.data(), text.size(), 0) < 0) return;
}

std::string RunLock::owner(const fs::path& folder) {
  const int file = ::open((folder / ".lock").c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  struct stat found {};
  // What is written there counts where the file system has no locks.
  const bool is_held =
      file >= 0 && ::fstat(file, &found) == 0 && S_ISREG(found.st_mode) && ::flock(file, LOCK_SH | LOCK_NB) != 0;
  std::string owner = is_held ? owner_in(file) : "";
  if (file >= 0) ::close(file);
  return owner;
}

RunLock::~RunLock() {
  if (file_ < 0) return;
  ::unlink(path_.c_str());  // while it is ours
  ::close(file_);
}

std::optional<RunOptions> options_of_run(const fs::path& folder, const OptionTable& table) {
  const fs::path path = folder / "config.json";
  std::error_code ignored;
  const bool has_config = fs::exists(fs::symlink_status(path, ignored));
  const std::optional<FoundOptions> trained = last_options(Checkpoints(folder));
  if (!trained) {
    if (!has_config) return {};
    json::Value config = read_config(path);
    return RunOptions{std::move(*config.mutable_as<json::Object>()), {}};
  }
  RunOptions found{.values = trained->options, .differences = {}};
  const std::string rule = concat("; the run goes on with what ", trained->manifest.string(), " says");
  json::Value config;
  try {
    CHORALE_CHECK(has_config, path.string(), " is not there");
    config = read_config(path);
  } catch (const InvalidArgument& error) {
    found.differences.push_back(error.what() + rule);
    return found;
  }
  for (const auto& [name, value] : *config.as<json::Object>()) {
    const auto row = std::find_if(table.rows().begin(), table.rows().end(),
                                  [&key = name](const Option& option) { return option.name == key; });
    const auto old = std::find_if(found.values.begin(), found.values.end(),
                                  [&key = name](const auto& member) { return member.first == key; });
    if (old == found.values.end()) {
      found.values.emplace_back(name, value);
    } else if (row == table.rows().end() || row->kind == OptionKind::kFree) {
      old->second = value;
    } else if (json::write(old->second) != json::write(value)) {
      found.differences.push_back(concat(path.string(), " says ", name, " = ", json::write(value), ", but it was ",
                                         json::write(old->second), rule));
    }
  }
  return found;
}

}  // namespace chorale::train
