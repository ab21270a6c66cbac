#include "chorale/codegen/cache.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "chorale/base/config.h"
#include "chorale/base/descriptors.h"
#include "chorale/base/error.h"
#include "chorale/comm/timeout_extension.h"
#include "chorale/io/checksum.h"

namespace chorale::codegen {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMark = "chorale code 2\n";
constexpr int64_t kMostEntryBytes = int64_t{64} << 20;

class Descriptor {
 public:
  explicit Descriptor(int descriptor) : descriptor_(above_standard(descriptor)) {}
  ~Descriptor() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }

 private:
  int descriptor_;
};

bool write_all(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(descriptor, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

std::optional<std::string> read_all(int descriptor, int64_t most) {
  struct stat file {};
  if (::fstat(descriptor, &file) != 0 || file.st_size > most) return std::nullopt;
  std::string bytes(static_cast<size_t>(file.st_size), '\0');
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n = ::pread(descriptor, bytes.data() + at, bytes.size() - at, static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return std::nullopt;
    at += static_cast<size_t>(n);
  }
  return bytes;
}

bool is_own(const struct stat& file) { return file.st_uid == ::geteuid() && (file.st_mode & (S_IWGRP | S_IWOTH)) == 0; }

// An entry: how long it took to compile, and the shared object.
struct Built {
  std::chrono::milliseconds took{};
  std::string bytes;
};

// What is in an entry, if it can be trusted.
std::optional<Built> read_entry(int folder, const std::string& name) {
  const Descriptor file(::openat(folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat about {};
  if (!file || ::fstat(file.get(), &about) != 0 || !S_ISREG(about.st_mode) || !is_own(about)) return std::nullopt;
  std::optional<std::string> bytes = read_all(file.get(), kMostEntryBytes);
  constexpr size_t kHead = kMark.size() + 65;  // and a digest with its end of line
  if (!bytes || bytes->size() < kHead || bytes->compare(0, kMark.size(), kMark) != 0) return std::nullopt;
  const std::string digest = bytes->substr(kMark.size(), 64);
  bytes->erase(0, kHead);
  // The digest covers the name too, so that a file that was renamed or copied to another name is not taken for its
  // entry.
  if (io::sha256(name + *bytes) != digest) return std::nullopt;
  ::futimens(file.get(), nullptr);  // used just now
  const size_t line = bytes->find('\n');
  if (line == std::string::npos) return std::nullopt;
  return Built{std::chrono::milliseconds(std::strtoll(bytes->c_str(), nullptr, 10)), bytes->substr(line + 1)};
}

bool write_entry(int folder, const std::string& name, const Built& built) {
  const std::string bytes = concat(built.took.count(), "\n", built.bytes);
  static std::atomic<int> count{0};
  const std::string temporary = concat(".", name, ".", ::getpid(), ".", ++count);
  bool done = false;
  {
    const Descriptor file(
        ::openat(folder, temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    done = file && write_all(file.get(), kMark) && write_all(file.get(), io::sha256(name + bytes) + "\n") &&
           write_all(file.get(), bytes) && ::fsync(file.get()) == 0;
  }
  done = done && ::renameat(folder, temporary.c_str(), folder, name.c_str()) == 0;
  if (!done) ::unlinkat(folder, temporary.c_str(), 0);
  return done;
}

// Removes the oldest entries, and what processes that died left behind, until the rest is small enough.
void trim(const fs::path& folder, int64_t most_bytes) {
  struct Entry {
    fs::file_time_type time;
    fs::path path;
    int64_t bytes;
  };
  std::vector<Entry> entries;
  int64_t sum = 0;
  std::error_code error;
  for (const fs::directory_entry& at : fs::directory_iterator(folder, error)) {
    if (!at.is_regular_file(error) || at.is_symlink(error)) continue;
    entries.push_back({at.last_write_time(error), at.path(), static_cast<int64_t>(at.file_size(error))});
    sum += entries.back().bytes;
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.time < b.time; });
  for (const Entry& entry : entries) {
    if (sum <= most_bytes) break;
    fs::remove(entry.path, error);
    sum -= entry.bytes;
  }
}

// A folder that nobody else sees, for as long as it compiles.
class Workshop {
 public:
  explicit Workshop(const fs::path& otherwise) {
    for (const fs::path& base : {fs::path(config::env("TMPDIR").value_or("/tmp")), otherwise}) {
      std::string name = (base / ".chorale-XXXXXX").string();
      if (path_.empty() && !base.empty() && ::mkdtemp(name.data())) path_ = name;
    }
  }
  ~Workshop() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  Workshop(const Workshop&) = delete;
  Workshop& operator=(const Workshop&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// Compiles; the shared object's bytes, or nothing and why.
std::optional<Built> build(const Toolchain& toolchain, const std::string& text, const fs::path& otherwise,
                           std::chrono::milliseconds deadline, std::string& why) {
  const auto begin = std::chrono::steady_clock::now();
  const Workshop workshop(otherwise);
  if (workshop.path().empty()) {
    why = concat("no folder to compile in: ", std::strerror(errno));
    return std::nullopt;
  }
  const fs::path source = workshop.path() / "kernels.c", result = workshop.path() / "kernels.so";
  {
    const Descriptor file(::open(source.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!file || !write_all(file.get(), text)) {
      why = concat("cannot write ", source.string(), ": ", std::strerror(errno));
      return std::nullopt;
    }
  }
  why = run_compiler(toolchain, source, result, deadline);
  if (!why.empty()) return std::nullopt;
  const Descriptor file(::open(result.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  std::optional<std::string> bytes = file ? read_all(file.get(), kMostEntryBytes) : std::nullopt;
  if (!bytes || bytes->empty()) {
    why = concat("the compiler left nothing in ", result.string());
    return std::nullopt;
  }
  const auto took = std::chrono::steady_clock::now() - begin;
  return Built{std::chrono::duration_cast<std::chrono::milliseconds>(took), std::move(*bytes)};
}

// The dynamic linker takes a file for one that is loaded already if its name is the same: the number of the call is
// written into the path, a bit as "/." or "//.".
std::string path_for_loader(int descriptor) {
  static std::atomic<uint32_t> calls{0};
  std::string path = "/proc/self/fd";
  for (uint32_t n = ++calls; n > 0; n >>= 1) path += n & 1u ? "//." : "/.";
  return concat(path, "/", descriptor);
}

}  // namespace

Code::Code(const std::string& bytes) {
  const Descriptor file(::memfd_create("chorale kernels", MFD_CLOEXEC));
  CHORALE_CHECK_STATE(file && write_all(file.get(), bytes), "[codegen] no memory to load ", bytes.size(),
                      " bytes: ", std::strerror(errno));
  handle_ = ::dlopen(path_for_loader(file.get()).c_str(), RTLD_NOW | RTLD_LOCAL);
  CHORALE_CHECK_STATE(handle_, "[codegen] generated code cannot be loaded: ", ::dlerror());
}
Code::~Code() {
  if (handle_) ::dlclose(handle_);
}

void* Code::function(const std::string& name) const {
  void* found = ::dlsym(handle_, name.c_str());
  CHORALE_CHECK_STATE(found, "[codegen] generated code has no function ", name);
  return found;
}

struct CodeCache::State {
  Options options;
  mutable std::mutex mutex;
  std::map<std::string, std::weak_ptr<const Code>> loaded;  // by toolchain and name of a kernel
  std::vector<std::shared_ptr<const Code>> kept;            // where there is no disk to come back from
  CacheCounts counts;
};

CodeCache::CodeCache() : CodeCache(Options{}) {}
CodeCache::CodeCache(Options options) : state_(std::make_shared<State>()) { state_->options = std::move(options); }

CacheCounts CodeCache::counts() const {
  const std::lock_guard lock(state_->mutex);
  return state_->counts;
}

void CodeCache::forget() {
  const std::lock_guard lock(state_->mutex);
  state_->loaded.clear();
  state_->kept.clear();
}

fs::path CodeCache::folder(std::string& why) const {
  if (!state_->options.on_disk) {
    why = "it is turned off";
    return {};
  }
  fs::path base = state_->options.folder;
  if (base.empty()) base = config::env("CHORALE_CACHE_DIR").value_or("");
  if (base.empty() && config::env("XDG_CACHE_HOME")) base = fs::path(*config::env("XDG_CACHE_HOME")) / "chorale";
  if (base.empty() && config::env("HOME")) base = fs::path(*config::env("HOME")) / ".cache" / "chorale";
  if (base.empty() || !base.is_absolute()) {
    why = "there is no home folder";
    return {};
  }
  std::error_code error;
  fs::create_directories(base, error);
  const fs::path folder = base / "code";
  ::mkdir(folder.c_str(), 0700);
  struct stat about {};
  if (::lstat(folder.c_str(), &about) != 0 || !S_ISDIR(about.st_mode)) {
    why = concat("there is no folder ", folder.string(), " and none can be made");
  } else if (about.st_uid != ::geteuid() || (about.st_mode & 077) != 0) {
    why = concat(folder.string(), " is another user's, or others may look into it; its mode must be 0700");
  } else {
    return folder;
  }
  return {};
}

std::vector<LoadedKernel> CodeCache::get(const Toolchain& toolchain, const std::string& prelude,
                                         const std::vector<KernelText>& kernels, std::string& why) {
  const std::string identity = io::sha256(concat(toolchain.identity(), "\n", prelude));
  std::vector<LoadedKernel> found(kernels.size());
  const std::lock_guard lock(state_->mutex);
  std::string missing;
  std::vector<const KernelText*> in_file;
  for (size_t i = 0; i < kernels.size(); ++i) {
    found[i].code = state_->loaded[identity + kernels[i].name].lock();
    if (found[i].code) continue;
    missing += concat("\n", kernels[i].text);
    in_file.push_back(&kernels[i]);
  }
  std::shared_ptr<const Code> code;
  if (missing.empty()) {
    ++state_->counts.hit;
  } else {
    code = load(io::sha256(identity + missing), toolchain, prelude + missing, why);
    if (!code) return {};
    for (const KernelText* kernel : in_file) state_->loaded[identity + kernel->name] = code;
  }
  for (size_t i = 0; i < kernels.size(); ++i) {
    if (!found[i].code) found[i].code = code;
    found[i].address = found[i].code->function(kernels[i].name);
  }
  return found;
}

std::shared_ptr<const Code> CodeCache::load(const std::string& key, const Toolchain& toolchain, const std::string& text,
                                            std::string& why) {
  std::string why_no_folder;
  const fs::path path = folder(why_no_folder);
  const Descriptor folder(path.empty() ? -1 : ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat about {};
  const bool trusted = folder && ::fstat(folder.get(), &about) == 0 && is_own(about);
  if (trusted) {
    if (const auto entry = read_entry(folder.get(), key)) {
      try {
        auto code = std::make_shared<const Code>(entry->bytes);
        ++state_->counts.hit;
        // Other ranks may have to compile it (Note [Extended timeouts]). Whole seconds.
        state_->counts.saved += entry->took;
        comm::extend_timeouts(std::chrono::duration_cast<std::chrono::seconds>(entry->took));
        return code;
      } catch (const StateError&) {  // intact, and still nothing that can be loaded: it is made again
      }
    }
  }
  const std::optional<Built> built = build(toolchain, text, path, state_->options.deadline, why);
  if (!built) return nullptr;
  ++(trusted ? state_->counts.miss : state_->counts.bypass);
  if (trusted && write_entry(folder.get(), key, *built)) trim(path, state_->options.most_bytes);
  try {
    auto code = std::make_shared<const Code>(built->bytes);
    if (!trusted) state_->kept.push_back(code);
    return code;
  } catch (const StateError& error) {
    why = error.what();
    return nullptr;
  }
}

CodeCache& CodeCache::shared() {
  static CodeCache cache;
  return cache;
}

}  // namespace chorale::codegen
