#include "chorale/snapshot/index.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/io/safetensors.h"
#include "chorale/json/json.h"
#include "chorale/json/json_write.h"

namespace chorale::snapshot {
namespace {

constexpr const char* kFormat = "chorale checkpoint 1";

json::Value numbers(const Shape& shape) {
  json::Array list;
  for (const int64_t n : shape) list.emplace_back(json::Value::Data(n));
  return json::Value(std::move(list));
}
json::Value text(std::string value) { return json::Value(json::Value::Data(std::move(value))); }

json::Value to_json(const SavedChunk& chunk) {
  json::Object object{{"file", text(chunk.file)}, {"name", text(chunk.name)}};
  if (chunk.checksum) object.emplace_back("crc32c", json::Value(json::Value::Data(int64_t{*chunk.checksum})));
  object.emplace_back("offsets", numbers(chunk.region.offsets));
  object.emplace_back("sizes", numbers(chunk.region.sizes));
  return json::Value(std::move(object));
}

// Reading, with the place in the file for messages.
struct Reader {
  std::string what;

  Reader in(std::string_view key) const { return {concat(what, ": ", key)}; }
  const json::Value& member(const json::Object& object, std::string_view key) const {
    const json::Value* value = json::find(object, key);
    CHORALE_CHECK(value, what, " has no \"", key, "\"");
    return *value;
  }
  Shape shape(const json::Object& object, std::string_view key) const {
    Shape sizes;
    for (const json::Value& n : member(object, key).array(concat(what, ": ", key)))
      sizes.push_back(n.size(concat(what, ": ", key)));
    CHORALE_CHECK(sizes.size() <= kMaxDims, what, ": ", key, " has ", sizes.size(), " dimensions; at most ", kMaxDims);
    return sizes;
  }
  std::string string(const json::Object& object, std::string_view key) const {
    return member(object, key).string(concat(what, ": ", key));
  }
  SavedChunk chunk(const json::Value& value, const Index& index, DType dtype) const {
    const json::Object& object = value.object(what);
    SavedChunk chunk{.region = {shape(object, "offsets"), shape(object, "sizes")},
                     .file = string(object, "file"),
                     .name = string(object, "name")};
    if (const json::Value* sum = json::find(object, "crc32c")) chunk.checksum = static_cast<uint32_t>(sum->size(what));
    CHORALE_CHECK(index.files.contains(chunk.file), what, " is in ", chunk.file, ", which is not among the files");
    // This is checked before memory is taken. A file may be larger than its parts, by its header.
    const int64_t elems = chunk.region.volume(), bytes = index.files.at(chunk.file);
    CHORALE_CHECK(elems <= bytes / static_cast<int64_t>(size_of(dtype)), what, ": a part of ", elems, " elements of ",
                  dtype, " cannot be in ", chunk.file, ", which has ", bytes, " bytes");
    return chunk;
  }
};

}  // namespace

std::filesystem::path index_path(const std::filesystem::path& folder) { return folder / "index.json"; }
bool has_checkpoint(const std::filesystem::path& folder) {
  std::error_code none;
  return std::filesystem::is_regular_file(index_path(folder), none);
}

Index read_index(const std::filesystem::path& folder) {
  CHORALE_CHECK(has_checkpoint(folder), "[checkpoint] there is no checkpoint in ", folder,
                ": it has no index.json, which is written last; a save that did not end leaves none");
  const auto file = io::MappedFile::open(index_path(folder));
  return parse_index(file->path().string(), file->text());
}

Index parse_index(std::string_view what, std::string_view text) {
  const Reader reader{concat("[checkpoint] ", what)};
  const json::Value parsed = json::parse(what, text);
  const json::Object& root = parsed.object(reader.what);
  const std::string format = reader.string(root, "format");
  CHORALE_CHECK(format == kFormat, reader.what, " has the format \"", format, "\"; expected \"", kFormat, "\"");
  Index index;
  for (const auto& [name, bytes] : reader.member(root, "files").object(reader.what)) {
    // A name must not lead out of the folder.
    CHORALE_CHECK(!name.empty() && name.find('/') == std::string::npos && name != "..", reader.what,
                  ": a file of the checkpoint cannot be called \"", name, "\"");
    index.files[name] = bytes.size(reader.what);
  }
  for (const auto& [key, value] : reader.member(root, "tensors").object(reader.what)) {
    const Reader at = reader.in(key);
    const json::Object& object = value.object(at.what);
    SavedTensor& tensor = index.tensors[key];
    tensor.dtype = dtype_from_name(at.string(object, "dtype"));
    tensor.sizes = at.shape(object, "shape");
    std::vector<Region> regions;
    for (const json::Value& chunk : at.member(object, "chunks").array(at.what)) {
      tensor.chunks.push_back(at.chunk(chunk, index, tensor.dtype));
      regions.push_back(tensor.chunks.back().region);
    }
    check_cover(at.what, tensor.sizes, regions);
  }
  for (const auto& [key, value] : reader.member(root, "bytes").object(reader.what))
    index.bytes[key] = reader.in(key).chunk(value, index, DType::kU8);
  return index;
}

std::string index_text(const Index& index) {
  json::Object tensors, bytes, files;
  for (const auto& [key, tensor] : index.tensors) {
    json::Array chunks;
    for (const SavedChunk& chunk : tensor.chunks) chunks.push_back(to_json(chunk));
    json::Object object{{"dtype", text(std::string(name_of(tensor.dtype)))}, {"shape", numbers(tensor.sizes)}};
    object.emplace_back("chunks", json::Value(std::move(chunks)));
    tensors.emplace_back(key, json::Value(std::move(object)));
  }
  for (const auto& [key, chunk] : index.bytes) bytes.emplace_back(key, to_json(chunk));
  for (const auto& [name, size] : index.files) files.emplace_back(name, json::Value(json::Value::Data(size)));
  json::Object root{{"format", text(kFormat)}};
  root.emplace_back("tensors", json::Value(std::move(tensors)));
  root.emplace_back("bytes", json::Value(std::move(bytes)));
  root.emplace_back("files", json::Value(std::move(files)));
  return json::write(root, json::Layout::kPages);
}

void write_index(const std::filesystem::path& folder, const Index& index) {
  io::write_file(index_path(folder), index_text(index));
}

namespace {

// The prefix that the names of this file's tensors get in the index; none for a file that no checkpoint without an
// index has.
std::optional<std::string> prefix_of_plain(const std::string& file) {
  constexpr std::string_view kEnding = ".safetensors", kRank = "rank-";
  if (!file.ends_with(kEnding)) return {};
  const std::string stem = file.substr(0, file.size() - kEnding.size());
  if (stem == "model" || stem.starts_with("model-") || stem == "training") return "";
  // What a rank of an older run knew by itself. The files of an index have one more number.
  const bool is_rank = stem.starts_with(kRank) && stem.size() > kRank.size() &&
                       stem.find_first_not_of("0123456789", kRank.size()) == std::string::npos;
  return is_rank ? std::optional(stem + "/") : std::nullopt;
}

}  // namespace

Index find_index(const std::filesystem::path& folder) {
  if (has_checkpoint(folder)) return read_index(folder);
  Index index;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
    const std::string name = entry.path().filename().string();
    const std::optional<std::string> prefix = prefix_of_plain(name);
    if (!prefix) continue;
    const io::SafetensorsFile file(entry.path());
    index.files[name] = static_cast<int64_t>(entry.file_size());
    for (const io::SafetensorsEntry& row : file.entries()) {
      const bool is_new =
          index.tensors
              .emplace(*prefix + row.name,
                       SavedTensor{file.load(row.name).dtype(), row.sizes, {{whole_of(row.sizes), name, row.name}}})
              .second;
      CHORALE_CHECK(is_new, "[checkpoint] two files in ", folder.string(), " have a tensor ", row.name);
    }
  }
  return index.files.empty() ? read_index(folder) : index;
}

}  // namespace chorale::snapshot
