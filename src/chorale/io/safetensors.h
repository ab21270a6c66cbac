// Tensors by name in a file: the safetensors format, in one file or in shards with an index, as the Hugging Face
// libraries write and read them.
#pragma once

#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "chorale/io/file.h"
#include "chorale/tensor/tensor.h"

namespace chorale::io {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;
using Metadata = std::map<std::string, std::string>;

// What the header of a file says of a tensor. The format has dtypes that tensors have not (U16, U32, U64, F8_…): such a
// tensor is listed, and only loading it is an error.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // as the format spells it: "F32"
  Shape sizes;
  size_t begin = 0, end = 0;  // bytes in the data part of the file
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of the header
  Metadata metadata;
  size_t data_begin = 0;  // where the data part begins in the file
};

// Reads the header of a whole file. Nothing in it is trusted: its length, its JSON, dtypes, shapes and offsets are
// checked against the file, which the tensors must cover without holes or overlaps. `what` names the file in errors
// (InvalidArgument).
SafetensorsHeader parse_safetensors(std::string_view what, std::span<const std::byte> file);

// A file whose tensors are loaded one by one.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  const Metadata& metadata() const { return header_.metadata; }
  bool contains(const std::string& name) const { return by_name_.contains(name); }
  // The tensor on the mapped file itself, read-only: nothing is copied, pages are read when they are touched, and the
  // mapping lives as long as the last of its tensors. A tensor that the file keeps at an odd address is copied.
  Tensor load(const std::string& name) const;

 private:
  std::shared_ptr<const MappedFile> file_;
  SafetensorsHeader header_;
  std::unordered_map<std::string, size_t> by_name_;
};

struct Checkpoint {
  NamedTensors tensors;
  Metadata metadata;
};

// Reads all tensors, in the order in which they were saved: from a .safetensors file, from an index (a .json file) and
// the shards that it names, or from a folder with either `model.safetensors` or `model.safetensors.index.json`.
// Tensors are as SafetensorsFile::load makes them.
Checkpoint load(const std::filesystem::path& path);

// Writes one file, atomically (AtomicFile). Tensors need not be contiguous. c128 has no name in the format.
void save(const std::filesystem::path& path, const NamedTensors& tensors, const Metadata& metadata = {});

// Writes `model.safetensors` into a folder (which is made if need be), or, if that would have more than
// `max_shard_bytes`, shards `model-00001-of-00003.safetensors` and their index. A tensor is never cut, so one that is
// larger gets a larger shard of its own. Each file appears at once and the index after its shards; files that an
// earlier call left and that are no longer named are removed at the end.
void save_sharded(const std::filesystem::path& folder, const NamedTensors& tensors, size_t max_shard_bytes,
                  const Metadata& metadata = {});

}  // namespace chorale::io
