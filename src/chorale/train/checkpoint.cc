#include "chorale/train/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/io/checksum.h"
#include "chorale/io/sharded.h"
#include "chorale/json/json_write.h"
#include "chorale/snapshot/snapshot.h"

namespace chorale::train {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kFormat = 2, kOldestFormat = 1;
constexpr const char* kManifest = "manifest.json";
constexpr size_t kMostManifestBytes = 10'000'000;
// The last member of a manifest is the checksum of the text before it.
constexpr std::string_view kSeal = ",\n  \"sha256\": \"";
constexpr std::string_view kPrefix = "step-";

// "step-00001000"; before it is finished ".step-00001000.new".
std::string folder_name(int64_t step) { return fmt::format("{}{:08}", kPrefix, step); }
std::string unfinished_name(int64_t step) { return fmt::format(".{}.new", folder_name(step)); }

json::Value manifest_of(const Checkpoint& checkpoint, const fs::path& folder) {
  json::Array files;
  std::vector<fs::path> paths;
  const snapshot::Index index = snapshot::read_index(folder);
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (!index.files.contains(entry.path().filename().string())) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  for (const fs::path& path : paths) {
    const auto file = io::MappedFile::open(path);
    files.emplace_back(json::Object{{"name", json::Value(path.filename().string())},
                                    {"bytes", json::Value(static_cast<int64_t>(file->bytes().size()))},
                                    {"sha256", json::Value(io::sha256(file->bytes()))}});
  }
  return json::Value(json::Object{{"format", json::Value(kFormat)},
                                  {"step", json::Value(checkpoint.step)},
                                  {"data", json::Value(checkpoint.data)},
                                  {"options", json::Value(checkpoint.options)},
                                  {"files", json::Value(std::move(files))}});
}

void write_manifest(const Checkpoint& checkpoint, const fs::path& folder) {
  std::string text = json::write(manifest_of(checkpoint, folder), json::Layout::kPages);
  text.resize(text.size() - 2);  // "\n}"
  const std::string seal = io::sha256(text);
  io::write_file(folder / kManifest, text.append(kSeal) + seal + "\"\n}\n");
}

json::Value read_manifest(const fs::path& path) {
  const auto file = io::MappedFile::open(path);
  const std::string_view text = file->text();
  CHORALE_CHECK(text.size() <= kMostManifestBytes, "[checkpoint] ", path.string(), " is damaged: it has ", text.size(),
                " bytes, and no manifest more than ", kMostManifestBytes);
  const size_t at = text.rfind(kSeal);
  CHORALE_CHECK(
      at != std::string_view::npos && text.substr(at + kSeal.size()) == io::sha256(text.substr(0, at)) + "\"\n}\n",
      "[checkpoint] ", path.string(), " is damaged: its checksum differs from its text");
  return json::parse(path.string(), text);
}

const json::Value& member(const json::Object& object, const char* key, const std::string& what) {
  const json::Value* value = json::find(object, key);
  CHORALE_CHECK(value, "[checkpoint] ", what, " has no ", key);
  return *value;
}

void check_file(const fs::path& folder, const json::Object& row, const std::string& what) {
  const fs::path path = folder / member(row, "name", what).string("name");
  const auto file = io::MappedFile::open(path);
  const auto bytes = static_cast<size_t>(member(row, "bytes", what).size("bytes"));
  CHORALE_CHECK(file->bytes().size() == bytes, "[checkpoint] ", path.string(), " is damaged: it has ",
                file->bytes().size(), " bytes instead of ", bytes);
  CHORALE_CHECK(io::sha256(file->bytes()) == member(row, "sha256", what).string("sha256"), "[checkpoint] ",
                path.string(), " is damaged: its checksum is not the one that was written down");
}

// "step-00000500". Others, such as the copy of a checkpoint, are not ours.
bool is_name_of_checkpoint(std::string_view name) {
  return name.starts_with(kPrefix) && name.size() > kPrefix.size() &&
         name.find_first_not_of("0123456789", kPrefix.size()) == std::string_view::npos;
}

// Whether all that is in a checkpoint's folder was written with it, so that it may go. Somebody may have put notes
// there.
bool is_all_ours(const fs::path& folder) {
  std::set<std::string> ours{kManifest};
  try {
    const json::Value manifest = read_manifest(folder / kManifest);
    for (const json::Value& row : member(manifest.object(kManifest), "files", kManifest).array("files"))
      ours.insert(member(row.object("a file"), "name", kManifest).string("name"));
    for (const auto& [name, bytes] : snapshot::find_index(folder).files) ours.insert(name);
  } catch (const InvalidArgument&) {
    return false;  // damaged, or none of ours
  }
  std::error_code error;
  const fs::directory_iterator entries(folder, error);
  return !error && std::all_of(begin(entries), end(entries), [&](const fs::directory_entry& entry) {
    return ours.contains(entry.path().filename().string());
  });
}

// The folder is renamed first: a process that ends in between leaves no folder that is half a checkpoint.
void remove_folder(const fs::path& path) {
  const fs::path hidden = path.parent_path() / ("." + path.filename().string() + ".old");
  fs::remove_all(hidden);
  io::rename_durably(path, hidden);
  fs::remove_all(hidden);
}

}  // namespace

Checkpoints::Checkpoints(const fs::path& run) : folder_(run / "checkpoints") {
  std::error_code error;
  const fs::file_status status = fs::status(folder_, error);
  CHORALE_CHECK(fs::is_directory(status) || status.type() == fs::file_type::not_found, "[checkpoint] ",
                folder_.string(), " should be a folder, but ",
                error ? concat("cannot be read: ", error.message()) : "is something else");
}

void Checkpoints::remove_unfinished() const {
  if (!fs::exists(folder_)) return;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string();
    const bool is_half = name.starts_with('.') && (name.ends_with(".new") || name.ends_with(".old"));
    if (is_half && is_name_of_checkpoint(name.substr(1, name.size() - 5))) fs::remove_all(entry.path());
  }
}

fs::path Checkpoints::begin(int64_t step) const {
  const fs::path folder = folder_ / unfinished_name(step);
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

void Checkpoints::finish(const Checkpoint& checkpoint, int64_t keep) const {
  const fs::path unfinished = folder_ / unfinished_name(checkpoint.step),
                 finished = folder_ / folder_name(checkpoint.step);
  write_manifest(checkpoint, unfinished);
  if (fs::exists(finished)) remove_folder(finished);
  io::rename_durably(unfinished, finished);
  const std::vector<fs::path> all = list();
  for (size_t i = 0; i + static_cast<size_t>(keep) < all.size(); ++i) {
    if (is_all_ours(all[i])) remove_folder(all[i]);
  }
}

std::vector<fs::path> Checkpoints::list() const {
  std::vector<fs::path> folders;
  if (!fs::exists(folder_)) return folders;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    if (is_name_of_checkpoint(entry.path().filename().string())) folders.push_back(entry.path());
  }
  std::sort(folders.begin(), folders.end(), [](const fs::path& a, const fs::path& b) {
    // They are sorted by number, and numbers of more than eight digits are longer names.
    const std::string x = a.filename().string(), y = b.filename().string();
    return x.size() != y.size() ? x.size() < y.size() : x < y;
  });
  return folders;
}

Checkpoint load_checkpoint(const fs::path& folder) {
  const std::string what = (folder / kManifest).string();
  const json::Value root = read_manifest(what);
  const json::Object& manifest = root.object(what);
  const int64_t format = member(manifest, "format", what).size("format");
  CHORALE_CHECK(format >= kOldestFormat && format <= kFormat, "[checkpoint] ", what, " has format ", format,
                "; this program knows formats up to ", kFormat, " only");
  for (const json::Value& row : member(manifest, "files", what).array("files")) {
    check_file(folder, row.object("a file"), what);
  }
  // The files of ranks, which the index names; those of older checkpoints have no checksums but the manifest's.
  if (const std::vector<std::string> problems = snapshot::verify(folder); !problems.empty())
    throw InvalidArgument(problems.front());
  return {.step = member(manifest, "step", what).size("step"),
          .data = member(manifest, "data", what).string("data"),
          .options = member(manifest, "options", what).object("options")};
}

std::optional<FoundCheckpoint> find_checkpoint(const Checkpoints& checkpoints, bool or_previous) {
  std::vector<fs::path> folders = checkpoints.list();
  while (!folders.empty()) {
    const fs::path folder = folders.back();
    folders.pop_back();
    try {
      return FoundCheckpoint{folder, load_checkpoint(folder)};
    } catch (const InvalidArgument& error) {
      if (folders.empty()) throw InvalidArgument(concat(error.what(), "; there is no checkpoint before it"));
      if (!or_previous) {
        throw InvalidArgument(concat(error.what(), ". The one before it, ", folders.back().string(),
                                     ", is used only when asked: --resume-previous"));
      }
      log_warning(concat(error.what(), "; going back to ", folders.back().string()));
    }
  }
  return {};
}

std::optional<FoundOptions> last_options(const Checkpoints& checkpoints) {
  const std::vector<fs::path> folders = checkpoints.list();
  for (auto folder = folders.rbegin(); folder != folders.rend(); ++folder) {
    const fs::path path = *folder / kManifest;
    try {
      const json::Value manifest = read_manifest(path);
      return FoundOptions{path, member(manifest.object(path.string()), "options", path.string()).object("options")};
    } catch (const InvalidArgument&) {
      continue;  // find_checkpoint complains
    }
  }
  return {};
}

NamedTensors model_tensors(const fs::path& folder) {
  if (!snapshot::has_checkpoint(folder)) return io::load(folder).tensors;
  NamedTensors tensors;
  const snapshot::State state =
      snapshot::read(folder, [](const std::string& key) { return key.find('/') == std::string::npos; });
  tensors.reserve(state.chunks.size());
  for (const snapshot::TensorChunk& chunk : state.chunks) tensors.emplace_back(chunk.key, chunk.local);
  return tensors;
}

}  // namespace chorale::train
