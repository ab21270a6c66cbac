// The index of a checkpoint: which tensors there are, and which file has which part of them. It is written last, so a
// checkpoint exists once its index does.
//
//   index.json           {"format": …, "tensors": {key: {"dtype", "shape", "chunks": […]}}, "bytes": {…}, "files": {…}}
//   rank-0-….safetensors the parts that rank 0 wrote; any library for safetensors reads them
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "chorale/snapshot/region.h"

namespace chorale::snapshot {

struct SavedChunk {
  Region region;
  std::string file;                    // in the folder of the checkpoint
  std::string name;                    // of the tensor in that file
  std::optional<uint32_t> checksum{};  // of its bytes: CRC-32C; none in plain files
};
struct SavedTensor {
  DType dtype = DType::kF32;
  Shape sizes;
  std::vector<SavedChunk> chunks;
};

struct Index {
  std::map<std::string, SavedTensor> tensors;
  std::map<std::string, SavedChunk> bytes;  // what is no tensor
  std::map<std::string, int64_t> files;     // and their sizes in bytes
};

std::filesystem::path index_path(const std::filesystem::path& folder);
bool has_checkpoint(const std::filesystem::path& folder);
// Throws InvalidArgument, naming the file, for a folder that has none and for anything that write_index() does not
// make: nothing in the file is trusted.
Index read_index(const std::filesystem::path& folder);
Index parse_index(std::string_view what, std::string_view text);
std::string index_text(const Index& index);
// Atomically. StateError when the system refuses.
void write_index(const std::filesystem::path& folder, const Index& index);
// The index of a folder. Where it has none and there are plain files in it (model.safetensors, or model-1-of-2.…, with
// training.safetensors and rank-0.safetensors of older runs), one that is made of these: keys are the names in the
// files, and what is in rank-0.safetensors has "rank-0/" before it.
Index find_index(const std::filesystem::path& folder);

}  // namespace chorale::snapshot
