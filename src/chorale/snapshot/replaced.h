// Inside checkpoints: files in their folder that no checkpoint names any more.
//
// Note [Room of replaced files] A save writes new files, because the checkpoint that is there must stay whole until the
// next one is. Where files are memory, finding pages for them and giving those of the old ones back takes three times
// as long as copying the bytes. So the old files stay, under another name, and the save after this one writes over
// them: the room that every save needs anyway is kept from save to save. By default that is done in memory only, and
// only where at least kPlenty times the size of the checkpoint is free. A file that somebody has open or mapped, or
// under another name, is not written over (io::AtomicFile).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace chorale::snapshot {

// What one of `count` ranks that write into a folder, number `own` of them, looks after there: removing takes a third
// of the time of writing, so they share it.
class Leftovers {
 public:
  static constexpr std::string_view kPart = "rank-", kKind = ".safetensors";  // names of files that ranks write
  static constexpr std::string_view kMarker = ".saving-", kSpare = ".spare-";

  Leftovers(std::filesystem::path folder, size_t own, size_t count)
      : folder_(std::move(folder)), own_(own), count_(count) {}

  // Files that were kept for this rank to write over.
  std::vector<std::filesystem::path> kept() const;
  // Removes what is in no checkpoint, whose files are `named`: those of the one before, and what saves left that did
  // not end. Up to `most_kept` of the former stay for the next save.
  void put_away(const std::map<std::string, int64_t>& named, size_t most_kept) const;

 private:
  std::filesystem::path folder_;
  size_t own_, count_;
};

// Whether files in the folder are memory, with plenty of it beyond a second checkpoint of so many bytes.
bool has_memory_for(const std::filesystem::path& folder, uint64_t bytes);

}  // namespace chorale::snapshot
