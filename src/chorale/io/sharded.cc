#include "chorale/io/sharded.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <system_error>

#include "chorale/json/json.h"

// Shards: {"metadata": {"total_size": 123}, "weight_map": {"tensor": "model-00001-of-00002.safetensors", …}}.

namespace chorale::io {
namespace {

constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";

struct Index {
  Metadata metadata;                                         // strings only; total_size is checked and left out
  std::vector<std::pair<std::string, std::string>> file_of;  // by tensor, in order
};

// A shard lies beside its index: a name that leads elsewhere is an attack or a mistake.
void check_plain_name(std::string_view what, const std::string& file) {
  CHORALE_CHECK(!file.empty() && file != "." && file != ".." && file.find('/') == std::string::npos &&
                    file.find('\0') == std::string::npos,
                "[load] ", what, " names a shard that is not a plain file name: ", json::quote(file));
}

Index read_index(const std::filesystem::path& path) {
  const auto file = MappedFile::open(path);
  const std::string what = path.string();
  const json::Value root = json::parse(what, file->text(), {.depth = 3});
  const json::Object& members = root.object(what);
  Index index;
  const json::Value* map = json::find(members, "weight_map");
  CHORALE_CHECK(map, "[load] ", what, " has no \"weight_map\"");
  for (const auto& [tensor, shard] : map->object("weight_map")) {
    check_plain_name(what, shard.string(tensor));
    index.file_of.emplace_back(tensor, shard.string(tensor));
  }
  if (const json::Value* metadata = json::find(members, "metadata")) {
    for (const auto& [key, value] : metadata->object("metadata")) {
      if (const auto* text = value.as<std::string>()) index.metadata.emplace(key, *text);
    }
  }
  return index;
}

Checkpoint load_shards(const std::filesystem::path& path) {
  Index index = read_index(path);
  std::map<std::string, SafetensorsFile> shards;
  size_t found = 0;
  Checkpoint result;
  for (const auto& [tensor, name] : index.file_of) {
    auto shard = shards.find(name);
    if (shard == shards.end()) {
      shard = shards.emplace(name, SafetensorsFile(path.parent_path() / name)).first;
      found += shard->second.entries().size();
      for (const auto& [key, value] : shard->second.metadata()) result.metadata.emplace(key, value);
    }
    result.tensors.emplace_back(tensor, shard->second.load(tensor));
  }
  CHORALE_CHECK(found == index.file_of.size(), "[load] ", path, " lists ", index.file_of.size(),
                " tensors, but its shards hold ", found, ": they do not belong together");
  for (auto& [key, value] : index.metadata) result.metadata[key] = std::move(value);
  return result;
}

std::string shard_name(size_t number, size_t count) {
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", number, count);
  return name;
}

// The files of an earlier call, to be removed when they are no longer named. An index that is absent or cannot be read
// names none.
std::set<std::string> files_of_index(const std::filesystem::path& path) {
  std::set<std::string> names;
  try {
    for (const auto& [tensor, file] : read_index(path).file_of) names.insert(file);
  } catch (const InvalidArgument&) {
    return {};
  }
  return names;
}

bool is_there(const std::filesystem::path& path) {
  std::error_code ignored;  // what cannot be asked for cannot be opened either
  return std::filesystem::exists(path, ignored);
}

std::string index_text(const std::vector<NamedTensors>& shards, size_t total_bytes, const Metadata& metadata) {
  std::string text = "{\n  \"metadata\": {\n    \"total_size\": " + std::to_string(total_bytes);
  for (const auto& [key, value] : metadata) text += ",\n    " + json::quote(key) + ": " + json::quote(value);
  text += "\n  },\n  \"weight_map\": {";
  const char* separator = "\n    ";
  for (size_t i = 0; i < shards.size(); ++i) {
    for (const auto& [name, tensor] : shards[i]) {
      text += separator + json::quote(name) + ": " + json::quote(shard_name(i + 1, shards.size()));
      separator = ",\n    ";
    }
  }
  return text + "\n  }\n}\n";
}

}  // namespace

Checkpoint load(const std::filesystem::path& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    const bool single = is_there(path / kSingleName);
    CHORALE_CHECK(single || is_there(path / kIndexName), "[load] folder ", path, " has neither ", kSingleName, " nor ",
                  kIndexName);
    return load(path / (single ? kSingleName : kIndexName));
  }
  if (path.extension() == ".json") return load_shards(path);
  const SafetensorsFile file(path);
  Checkpoint result{.tensors = {}, .metadata = file.metadata()};
  for (const SafetensorsEntry& entry : file.entries()) result.tensors.emplace_back(entry.name, file.load(entry.name));
  return result;
}

void save_sharded(const std::filesystem::path& folder, const NamedTensors& tensors, size_t max_shard_bytes,
                  const Metadata& metadata) {
  CHORALE_CHECK(max_shard_bytes > 0, "[save_sharded] a shard needs room for at least one byte");
  // A name in two shards would pass the checks of save, which sees one shard.
  std::set<std::string_view> names;
  for (const auto& [name, tensor] : tensors) {
    CHORALE_CHECK(tensor.defined(), "[save] tensor \"", name, "\" is undefined");
    CHORALE_CHECK(names.insert(name).second, "[save] there are two tensors called \"", name, "\"");
  }
  std::vector<NamedTensors> shards(1);
  size_t total_bytes = 0, shard_bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    const size_t bytes = static_cast<size_t>(tensor.elems()) * tensor.elem_bytes();
    if (shard_bytes + bytes > max_shard_bytes && !shards.back().empty()) {
      shards.emplace_back();
      shard_bytes = 0;
    }
    shards.back().emplace_back(name, tensor);
    shard_bytes += bytes;
    total_bytes += bytes;
  }

  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  CHORALE_CHECK(!failed, "[save_sharded] cannot make folder ", folder, ": ", failed.message());
  std::set<std::string> stale = files_of_index(folder / kIndexName);
  stale.insert(kSingleName);
  stale.insert(kIndexName);
  // At every moment the folder loads as before this call or as after it, as long as the shards have new names; with the
  // same number of shards as before, they replace the old ones one by one.
  if (shards.size() == 1) {
    save(folder / kSingleName, tensors, metadata);
    stale.erase(kSingleName);
  } else {
    for (size_t i = 0; i < shards.size(); ++i) {
      const std::string name = shard_name(i + 1, shards.size());
      save(folder / name, shards[i], metadata);
      stale.erase(name);
    }
    AtomicFile index(folder / kIndexName);
    index.write(index_text(shards, total_bytes, metadata));
    index.commit();
    stale.erase(kIndexName);
  }
  for (const std::string& name : stale) {
    std::filesystem::remove(folder / name, failed);
    CHORALE_CHECK_STATE(!failed, "[save_sharded] cannot remove ", folder / name, ": ", failed.message());
  }
}

}  // namespace chorale::io
