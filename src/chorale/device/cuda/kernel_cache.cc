#include "chorale/device/cuda/kernel_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "chorale/base/config.h"
#include "chorale/base/error.h"

namespace chorale::cuda {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[] = "chorale kernel 1\n";

// Code from it is run: nobody else may be able to write there.
bool is_ours_alone(const fs::path& folder) {
  struct stat facts {};
  return ::stat(folder.c_str(), &facts) == 0 && S_ISDIR(facts.st_mode) && facts.st_uid == ::geteuid() &&
         (facts.st_mode & 077) == 0;
}

std::string made_folder() {
  fs::path base;
  if (const auto named = config::env("CHORALE_CACHE_DIR")) {
    base = *named;
  } else if (const auto cache = config::env("XDG_CACHE_HOME")) {
    base = fs::path(*cache) / "chorale";
  } else if (const auto home = config::env("HOME")) {
    base = fs::path(*home) / ".cache/chorale";
  } else {
    return {};
  }
  std::error_code error;
  fs::create_directories(base, error);
  const fs::path folder = base / "cuda";
  ::mkdir(folder.c_str(), 0700);
  return is_ours_alone(folder) ? folder.string() : std::string();
}

uint64_t hash_of(const std::string& text, uint64_t seed) {
  uint64_t hash = 1469598103934665603ull ^ seed;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

fs::path file_of(const std::string& identity) {
  char name[48];
  std::snprintf(name, sizeof(name), "%016llx%016llx.cubin", static_cast<unsigned long long>(hash_of(identity, 0)),
                static_cast<unsigned long long>(hash_of(identity, 0x9e3779b97f4a7c15ull)));
  return fs::path(kernel_cache_folder()) / name;
}

// A length, then so many bytes.
void append(std::string& to, const std::string& part) {
  const uint64_t length = part.size();
  to.append(reinterpret_cast<const char*>(&length), sizeof(length));
  to += part;
}
bool take(const std::string& from, size_t& at, std::string& part) {
  uint64_t length = 0;
  if (from.size() - at < sizeof(length)) return false;
  std::memcpy(&length, from.data() + at, sizeof(length));
  at += sizeof(length);
  if (from.size() - at < length) return false;
  part = from.substr(at, length);
  at += length;
  return true;
}

}  // namespace

std::string kernel_cache_folder() {
  static const std::string folder = made_folder();
  return folder;
}

bool find_in_cache(const std::string& identity, CompiledKernel& found) {
  if (kernel_cache_folder().empty()) return false;
  std::ifstream in(file_of(identity), std::ios::binary);
  if (!in) return false;
  const std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const size_t magic = sizeof(kMagic) - 1;
  if (bytes.compare(0, magic, kMagic) != 0) return false;
  size_t at = magic;
  std::string same, binary;
  if (!take(bytes, at, same) || same != identity || !take(bytes, at, found.name) || !take(bytes, at, binary))
    return false;
  found.binary.assign(binary.begin(), binary.end());
  return true;
}

void put_into_cache(const std::string& identity, const CompiledKernel& kernel) {
  if (kernel_cache_folder().empty()) return;
  std::string bytes(kMagic);
  append(bytes, identity);
  append(bytes, kernel.name);
  append(bytes, std::string(kernel.binary.begin(), kernel.binary.end()));
  // Complete under another name first: other processes read while this one writes.
  static std::atomic<int> number{0};
  const fs::path file = file_of(identity);
  const fs::path unfinished = concat(file.string(), ".", ::getpid(), ".", number++);
  std::error_code ignored;
  if (std::ofstream out(unfinished, std::ios::binary);
      out.write(bytes.data(), static_cast<std::streamsize>(bytes.size())))
    out.close();
  if (fs::file_size(unfinished, ignored) == bytes.size()) {
    fs::rename(unfinished, file, ignored);
  } else {
    fs::remove(unfinished, ignored);
  }
}

}  // namespace chorale::cuda
