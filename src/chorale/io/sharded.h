// Tensors by name, in one safetensors file or in several (shards) with an index, as the Hugging Face libraries write
// and read them.
#pragma once

#include <cstddef>
#include <filesystem>

#include "chorale/io/safetensors.h"
#include "chorale/tensor/named_tensors.h"

namespace chorale::io {

struct Checkpoint {
  NamedTensors tensors;
  Metadata metadata;
};

// Reads all tensors, in the order in which they were saved: from a .safetensors file, from an index (a .json file) and
// the shards that it names, or from a folder with either `model.safetensors` or `model.safetensors.index.json`.
// Tensors are as SafetensorsFile::load makes them.
Checkpoint load(const std::filesystem::path& path);

// Writes `model.safetensors` into a folder (which is made if need be), or, if that would have more than
// `max_shard_bytes`, shards `model-00001-of-00003.safetensors` and their index. A tensor is never cut, so one that is
// larger gets a larger shard of its own. Each file appears at once and the index after its shards; files that an
// earlier call left and that are no longer named are removed at the end.
void save_sharded(const std::filesystem::path& folder, const NamedTensors& tensors, size_t max_shard_bytes,
                  const Metadata& metadata = {});

}  // namespace chorale::io
