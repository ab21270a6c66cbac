// Tensors by name in a file: the safetensors format. sharded.h has several files of it with an index.
#pragma once

#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "chorale/io/file.h"
#include "chorale/tensor/named_tensors.h"

namespace chorale::io {

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
  // `is_read`: read() will be called, for which a descriptor is kept.
  explicit SafetensorsFile(const std::filesystem::path& path, bool is_read = false);

  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  const Metadata& metadata() const { return header_.metadata; }
  bool contains(const std::string& name) const { return by_name_.contains(name); }
  // The tensor on the mapped file itself, read-only: nothing is copied, pages are read when they are touched, and the
  // mapping lives as long as the last of its tensors. A tensor that the file keeps at an odd address is copied.
  Tensor load(const std::string& name) const;
  // Copies bytes of a tensor's data, from `begin` on, by reading them: where each is needed once, that takes less time
  // than mapping their pages. With `sum` it returns their CRC-32C. Throws InvalidArgument where the file has become
  // shorter.
  uint32_t read(const std::string& name, size_t begin, std::span<std::byte> into, bool sum) const;

 private:
  const SafetensorsEntry& entry(const std::string& name) const;

  std::shared_ptr<const MappedFile> file_;
  SafetensorsHeader header_;
  std::unordered_map<std::string, size_t> by_name_;
};

// Writes one file, atomically (AtomicFile). Tensors need not be contiguous. c128 has no name in the format.
void save(const std::filesystem::path& path, const NamedTensors& tensors, const Metadata& metadata = {});
// The same; returns the CRC-32C of each tensor's bytes, which are read once for both. `spare`: as AtomicFile takes it.
std::vector<uint32_t> save_with_checksums(const std::filesystem::path& path, const NamedTensors& tensors,
                                          const Metadata& metadata = {}, const std::filesystem::path& spare = {});

}  // namespace chorale::io
