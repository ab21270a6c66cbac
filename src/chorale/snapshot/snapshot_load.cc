#include <algorithm>

#include "chorale/autograd/autograd.h"
#include "chorale/base/crc32c.h"
#include "chorale/base/did_you_mean.h"
#include "chorale/io/safetensors.h"
#include "chorale/op/copy.h"
#include "chorale/snapshot/agreement.h"

namespace chorale::snapshot {
namespace {

// The files of a checkpoint, opened when they are needed. They are mapped: only what is touched is read.
class Files {
 public:
  Files(const std::filesystem::path& folder, const Index& index) : folder_(folder), index_(index) {}

  const io::SafetensorsFile& at(const std::string& name) {
    const auto found = open_.find(name);
    if (found != open_.end()) return found->second;
    const auto path = folder_ / name;
    std::error_code error;
    const auto bytes = std::filesystem::file_size(path, error);
    CHORALE_CHECK(!error, "[checkpoint] ", path, " is missing, and the index names it");
    CHORALE_CHECK(static_cast<int64_t>(bytes) == index_.files.at(name), "[checkpoint] ", path, " has ", bytes,
                  " bytes, and the index says ", index_.files.at(name));
    return open_.emplace(name, io::SafetensorsFile(path)).first->second;
  }
  // A saved part, checked against what the index says of it.
  Tensor load(const std::string& key, const SavedChunk& chunk, DType dtype) {
    const Tensor x = at(chunk.file).load(chunk.name);
    CHORALE_CHECK(x.sizes() == chunk.region.sizes && x.dtype() == dtype, "[checkpoint] ", key, " in ",
                  folder_ / chunk.file, " is ", x.dtype(), " ", x.sizes(), ", and the index says ", dtype, " ",
                  chunk.region.sizes);
    return x;
  }
  void check_bytes(const std::string& key, const SavedChunk& chunk, const Tensor& x) const {
    const uint32_t found =
        crc32c({static_cast<const std::byte*>(x.raw()), static_cast<size_t>(x.elems()) * x.elem_bytes()});
    CHORALE_CHECK(found == chunk.checksum, "[checkpoint] ", key, " in ", folder_ / chunk.file,
                  " is damaged: its checksum is ", found, ", and the index says ", chunk.checksum);
  }

 private:
  const std::filesystem::path& folder_;
  const Index& index_;
  std::map<std::string, io::SafetensorsFile> open_;
};

struct Reads {
  const SavedTensor* saved;
  std::vector<ReadItem> items;
};

}  // namespace

void load(const std::filesystem::path& folder, State& state, const LoadOptions& options) {
  load(comm::Group(), folder, state, options);
}

void load(const comm::Group& group, const std::filesystem::path& folder, State& state, const LoadOptions& options) {
  const NoGrad quiet;
  Index index;
  everywhere(group, Step::kPrepare, options.on_step, [&]() -> comm::Value {
    index = read_index(folder);
    return {};
  });
  std::vector<Reads> copies(state.chunks.size());
  everywhere(group, Step::kPlan, options.on_step, [&]() -> comm::Value {
    std::vector<std::string> missing;
    for (size_t i = 0; i < state.chunks.size(); ++i) {
      const TensorChunk& chunk = state.chunks[i];
      CHORALE_CHECK(chunk.local.defined(), "[checkpoint] ", chunk.key, " is an undefined tensor");
      const auto saved = index.tensors.find(chunk.key);
      if (saved == index.tensors.end()) {
        missing.push_back(chunk.key);
        continue;
      }
      copies[i] = {&saved->second, plan_read(chunk.key, saved->second, chunk.whole, chunk.region())};
    }
    for (const auto& [key, bytes] : state.bytes) {
      if (!index.bytes.contains(key)) missing.push_back(key);
    }
    std::vector<std::string> names;
    for (const auto& [key, tensor] : index.tensors) names.push_back(key);
    std::string text;
    for (size_t i = 0; i < missing.size() && i < 8; ++i)
      text += concat(i ? ", " : "", missing[i], missing.size() == 1 ? did_you_mean(missing[i], names) : "");
    CHORALE_CHECK(missing.empty() || options.partial, "[checkpoint] ", folder, " has no ", text,
                  missing.size() > 8 ? concat(" and ", missing.size() - 8, " more") : "",
                  "; allow a partial load to leave them as they are");
    return {};
  });
  everywhere(group, Step::kRead, options.on_step, [&]() -> comm::Value {
    Files files(folder, index);
    for (size_t i = 0; i < state.chunks.size(); ++i) {
      if (!copies[i].saved) continue;
      const TensorChunk& chunk = state.chunks[i];
      for (const ReadItem& item : copies[i].items) {
        const SavedChunk& saved = copies[i].saved->chunks[item.chunk];
        const Tensor x = files.load(chunk.key, saved, copies[i].saved->dtype);
        if (options.verify && item.region == saved.region) files.check_bytes(chunk.key, saved, x);
        copy_(part_of(chunk.local, chunk.region(), item.region), part_of(x, saved.region, item.region));
      }
    }
    for (auto& [key, bytes] : state.bytes) {
      const auto saved = index.bytes.find(key);
      if (saved == index.bytes.end()) continue;
      const Tensor x = files.load(key, saved->second, DType::kU8);
      if (options.verify) files.check_bytes(key, saved->second, x);
      bytes.assign(static_cast<const char*>(x.raw()), static_cast<size_t>(x.elems()));
    }
    return {};
  });
}

State read(const std::filesystem::path& folder, const std::string& prefix) {
  const Index index = read_index(folder);
  State state;
  for (const auto& [key, tensor] : index.tensors) {
    if (key.starts_with(prefix))
      state.chunks.push_back(
          {key, tensor.sizes, Shape(tensor.sizes.size()), Tensor::empty(tensor.sizes, tensor.dtype)});
  }
  for (const auto& [key, chunk] : index.bytes) {
    if (key.starts_with(prefix)) state.bytes[key] = " ";
  }
  load(folder, state);
  return state;
}

std::vector<std::string> verify(const std::filesystem::path& folder) {
  const Index index = read_index(folder);
  Files files(folder, index);
  std::vector<std::string> problems;
  const auto check = [&](const std::string& key, const SavedChunk& chunk, DType dtype) {
    try {
      files.check_bytes(key, chunk, files.load(key, chunk, dtype));
    } catch (const Error& error) {
      problems.emplace_back(error.what());
    }
  };
  for (const auto& [key, tensor] : index.tensors) {
    for (const SavedChunk& chunk : tensor.chunks) check(key, chunk, tensor.dtype);
  }
  for (const auto& [key, chunk] : index.bytes) check(key, chunk, DType::kU8);
  problems.erase(std::unique(problems.begin(), problems.end()), problems.end());
  return problems;
}

}  // namespace chorale::snapshot
