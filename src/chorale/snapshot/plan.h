// What each rank writes, and what it reads: pure functions of what all ranks have, so that every rank comes to the same
// answer. Nothing is communicated here.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "chorale/snapshot/index.h"

namespace chorale::snapshot {

// A part of a tensor that a rank could write; of what is no tensor, all of it.
struct WriteItem {
  std::string key;
  bool is_bytes = false;
  DType dtype = DType::kU8;
  Shape whole;
  Region region;
  uint64_t fingerprint = 0;  // of the values, where several ranks may have them; 0: not known

  int64_t bytes() const { return region.volume() * static_cast<int64_t>(size_of(dtype)); }
};

// Which rank writes what: places in each rank's list.
struct SavePlan {
  // A part that no rank with access to the folder has.
  struct Sent {
    size_t rank, item;
  };
  std::vector<std::vector<size_t>> writes;  // by rank
  std::vector<Sent> sent;                   // to the rank that writes for others, in this order
  std::vector<std::string> differing;       // keys whose copies on several ranks are not equal
};
// Where several ranks have the same chunk (the same key and offsets), one copy is written, by the one of them that has
// least to write so far, the lowest where several have. Empty parts are not written. Throws InvalidArgument, naming key
// and ranks, where dtypes or shapes differ and where the parts of a tensor do not make the whole. `writes` says which
// ranks can write; empty: all.
SavePlan plan_save(const std::vector<std::vector<WriteItem>>& items, const std::vector<bool>& writes = {});

// A copy: a region of the whole that is in one of the saved parts.
struct ReadItem {
  size_t chunk;    // of SavedTensor::chunks
  Region region;   // in the whole
  Shape in_saved;  // where that is in the saved part
  Shape in_local;  // and in the part that is loaded
};
// All that a part needs. Throws InvalidArgument where the whole has another shape.
std::vector<ReadItem> plan_read(const std::string& key, const SavedTensor& saved, const Shape& whole,
                                const Region& local);

// Shares out what has these sizes among `bins`, large ones first, each to the bin with least so far.
std::vector<std::vector<size_t>> balanced(const std::vector<int64_t>& bytes, size_t bins);

}  // namespace chorale::snapshot
