#include "chorale/snapshot/replaced.h"

#include <sys/vfs.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

#include "chorale/base/error.h"
#include "chorale/base/host.h"

namespace chorale::snapshot {
namespace {

constexpr uint64_t kPlenty = 4;

// The paths of all that is in the folder. They are collected before anything is renamed: what is renamed while the
// folder is read may be seen twice.
std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder) {
  std::error_code ignored;
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) paths.push_back(entry.path());
  return paths;
}

// The number behind kPart in a name without kSpare; none where the name is not one of ours.
std::optional<size_t> rank_in(std::string_view part) {
  if (!part.starts_with(Leftovers::kPart)) return std::nullopt;
  part.remove_prefix(Leftovers::kPart.size());
  size_t rank = 0;
  if (std::from_chars(part.data(), part.data() + part.size(), rank).ec != std::errc()) return std::nullopt;
  return rank;
}

}  // namespace

std::vector<std::filesystem::path> Leftovers::kept() const {
  std::vector<std::filesystem::path> spares;
  for (const std::filesystem::path& path : entries_of(folder_)) {
    const std::string name = path.filename().string(), part = name.substr(std::min(kSpare.size(), name.size()));
    const auto rank = rank_in(part);
    if (name.starts_with(kSpare) && rank && *rank % count_ == own_) spares.push_back(path);
  }
  return spares;
}

void Leftovers::put_away(const std::map<std::string, int64_t>& named, size_t most_kept) const {
  std::error_code ignored;
  for (const std::filesystem::path& path : entries_of(folder_)) {
    const std::string name = path.filename().string();
    const bool is_spare = name.starts_with(kSpare);
    const std::string part = is_spare ? name.substr(kSpare.size()) : name;
    // The file may also be one that was being written when its process ended.
    const auto rank = rank_in(part);
    const bool is_whole = part.ends_with(kKind),
               is_part = rank && (is_whole || part.find(concat(kKind, ".tmp-")) != std::string::npos);
    const bool is_old = is_part && (is_spare || !named.contains(name));
    if (!is_old && !name.starts_with(kMarker)) continue;
    if ((is_old ? *rank % count_ : 0) != own_) continue;
    if (is_old && is_whole && !is_spare && most_kept > 0) {
      std::filesystem::rename(path, folder_ / concat(kSpare, name), ignored);
      --most_kept;
    } else {
      std::filesystem::remove(path, ignored);
    }
  }
}

bool has_memory_for(const std::filesystem::path& folder, uint64_t bytes) {
  constexpr int64_t kTmpfs = 0x01021994, kRamfs = 0x858458f6;
  struct statfs status {};
  if (::statfs(folder.c_str(), &status) != 0) return false;
  const auto type = static_cast<int64_t>(status.f_type);
  if (type != kTmpfs && type != kRamfs) return false;
  uint64_t available = memory_room().free_bytes;
  if (type == kTmpfs && status.f_blocks > 0)  // one without a limit says 0 of 0
    available = std::min(available, static_cast<uint64_t>(status.f_bavail) * static_cast<uint64_t>(status.f_bsize));
  return available / kPlenty >= bytes;
}

}  // namespace chorale::snapshot
