// `chorale checkpoint show|verify|merge|convert`: looks at checkpoints and gives them another form.
#include <fmt/format.h>

#include <filesystem>
#include <iostream>
#include <memory>

#include "chorale/app/commands.h"
#include "chorale/base/error.h"
#include "chorale/base/printable.h"
#include "chorale/io/file.h"
#include "chorale/io/sharded.h"
#include "chorale/snapshot/snapshot.h"
#include "chorale/train/checkpoint.h"
#include "chorale/train/progress.h"
#include "chorale/train/run_folder.h"

namespace chorale::app {
namespace {

namespace fs = std::filesystem;

constexpr const char *kManifestFile = "manifest.json", *kIndexFile = "index.json";
constexpr size_t kMostShardBytes = 5'000'000'000;  // as Hugging Face's libraries cut files

// The folder itself where it is a checkpoint, or has plain files; of a run the last checkpoint.
fs::path checkpoint_in(const fs::path& folder) {
  std::error_code error;
  CHORALE_CHECK(fs::is_directory(folder, error), "[checkpoint] '", printable(folder.native()), "' is no folder",
                error ? ": " + error.message() : "");
  if (!snapshot::has_checkpoint(folder) && fs::is_directory(folder / "checkpoints", error)) {
    const std::vector<fs::path> all = train::Checkpoints(folder).list();
    CHORALE_CHECK(!all.empty(), "[checkpoint] the run in ", folder.string(), " has no checkpoint yet");
    return all.back();
  }
  return folder;
}

int64_t bytes_of(const snapshot::SavedTensor& tensor) {
  return snapshot::whole_of(tensor.sizes).volume() * static_cast<int64_t>(size_of(tensor.dtype));
}

std::string totals(const snapshot::Index& index) {
  int64_t bytes = 0, parts = 0;
  for (const auto& [key, tensor] : index.tensors) {
    bytes += bytes_of(tensor);
    parts += static_cast<int64_t>(tensor.chunks.size());
  }
  return fmt::format("{} tensors of {} bytes in {} parts; files: {}", train::grouped(std::ssize(index.tensors)),
                     train::grouped(bytes), train::grouped(parts), index.files.size());
}

void show(const std::string& name, bool with_parts) {
  const fs::path folder = checkpoint_in(name);
  const snapshot::Index index = snapshot::find_index(folder);
  std::cout << folder.string() << ": " << totals(index) << '\n';
  size_t longest = 0;
  for (const auto& [key, tensor] : index.tensors) longest = std::max(longest, key.size());
  for (const auto& [key, tensor] : index.tensors) {
    std::cout << fmt::format("  {:<{}}  {:<4}  {}", key, longest, name_of(tensor.dtype), concat(tensor.sizes));
    if (tensor.chunks.size() > 1) std::cout << fmt::format("  in {} parts", tensor.chunks.size());
    std::cout << '\n';
    if (!with_parts) continue;
    for (const snapshot::SavedChunk& chunk : tensor.chunks)
      std::cout << "    " << concat(chunk.region) << "  " << chunk.file << '\n';
  }
  for (const auto& [key, chunk] : index.bytes) {
    std::cout << fmt::format("  {:<{}}  {} bytes\n", key, longest, train::grouped(chunk.region.volume()));
  }
}

void verify(const std::string& name) {
  const fs::path folder = checkpoint_in(name);
  std::vector<std::string> problems = snapshot::verify(folder);
  // One of a run has a manifest, without which the run does not go on; what is merged or saved by a program has none.
  const bool is_of_run = fs::absolute(folder).parent_path().filename() == "checkpoints";
  if (problems.empty() && (is_of_run || fs::exists(folder / kManifestFile))) {
    try {
      train::load_checkpoint(folder);  // which looks at what the index does not name
    } catch (const InvalidArgument& error) {
      problems.emplace_back(error.what());
    }
  }
  for (const std::string& problem : problems) std::cerr << "chorale: " << problem << '\n';
  end_with(problems.empty() ? 0 : 1);
  std::cout << folder.string() << ": " << totals(snapshot::find_index(folder)) << "; all is well\n";
}

// A new folder for what is made of another one. It is filled under another name beside it: under its own it is there
// as a whole or not at all, and what fails leaves nothing in the way of the next try.
class NewFolder {
 public:
  explicit NewFolder(fs::path path) : path_(std::move(path)), shown_(printable(path_.native())) {
    std::error_code error;
    const fs::file_status status = fs::symlink_status(path_, error);
    CHORALE_CHECK(!fs::exists(status) || (fs::is_directory(status) && fs::is_empty(path_, error)), "[checkpoint] '",
                  shown_, "' is there already; choose a folder that is not, or is empty");
    CHORALE_CHECK(!path_.empty(), "[checkpoint] '' is no name for a folder");
    if (!path_.has_filename()) path_ = path_.parent_path();  // of "out/"
    if (path_.has_parent_path()) above_.make(path_.parent_path());
    for (int number = 0; !made_; ++number) {  // what was killed may have left one
      unfinished_ = path_.parent_path() / concat(".", path_.filename().string(), ".", number, ".new");
      made_ = fs::create_directory(unfinished_, error);
      CHORALE_CHECK_STATE(!error, "[checkpoint] cannot make the folder ", printable(unfinished_.native()), ": ",
                          error.message());
    }
  }
  ~NewFolder() {
    std::error_code ignored;
    if (made_) fs::remove_all(unfinished_, ignored);
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const fs::path& unfinished() const { return unfinished_; }
  void finish() {
    const std::string text = totals(snapshot::find_index(unfinished_));
    io::rename_durably(unfinished_, path_);
    made_ = false;
    std::cout << shown_ << ": " << text << '\n';
  }

 private:
  fs::path path_;
  std::string shown_;
  train::MadeFolders above_;
  fs::path unfinished_;
  bool made_ = false;
};

// What lies beside the tensors: config.json, a tokenizer.
void copy_others(const fs::path& from, const fs::path& to, const snapshot::Index& index) {
  for (const auto& entry : fs::directory_iterator(from)) {
    const std::string name = entry.path().filename().string();
    const bool is_ours = name == kManifestFile || name == kIndexFile || name == "model.safetensors.index.json";
    if (entry.is_regular_file() && !is_ours && !index.files.contains(name)) fs::copy_file(entry.path(), to / name);
  }
}

// Everything, with whole tensors in one file.
void merge(const std::string& name, const fs::path& out) {
  const fs::path folder = checkpoint_in(name);
  const snapshot::State state = snapshot::read(folder);
  NewFolder made(out);
  copy_others(folder, made.unfinished(), snapshot::find_index(folder));
  snapshot::save(made.unfinished(), state);
  made.finish();
}

// A checkpoint's model in Hugging Face's form, or the other way round.
void convert(const std::string& name, const fs::path& out) {
  const fs::path folder = checkpoint_in(name);
  const NamedTensors model = train::model_tensors(folder);
  CHORALE_CHECK(!model.empty(), "[checkpoint] ", folder.string(), " has no model");
  NewFolder made(out);
  copy_others(folder, made.unfinished(), snapshot::find_index(folder));
  if (snapshot::has_checkpoint(folder)) {
    // The libraries there refuse a file without this note.
    io::save_sharded(made.unfinished(), model, kMostShardBytes, {{"format", "pt"}});
  } else {
    snapshot::save(made.unfinished(), snapshot::state_of(model));
  }
  made.finish();
}

struct Names {
  std::string from, to;
  bool with_parts = false;
};

CLI::App* add_action(CLI::App& parent, const std::shared_ptr<Names>& names, const char* name, const char* help,
                     bool makes_another) {
  CLI::App* action = parent.add_subcommand(name, help);
  action->add_option("DIR", names->from, "folder of a checkpoint, of a run (its last one), or of a model")->required();
  if (makes_another) action->add_option("OUT", names->to, "a new folder")->required();
  return action;
}

}  // namespace

void add_checkpoint(CLI::App& program, Work& work) {
  CLI::App* command = program.add_subcommand("checkpoint", "Look at checkpoints, and give them another form");
  command->require_subcommand(1);
  const auto names = std::make_shared<Names>();
  CLI::App* shown = add_action(*command, names, "show", "List what is in it", false);
  shown->add_flag("--parts", names->with_parts, "Where each part of a tensor is, too");
  shown->callback([names, &work] { work = [names] { show(names->from, names->with_parts); }; });
  add_action(*command, names, "verify", "Compare sizes and checksums of every part", false)->callback([names, &work] {
    work = [names] { verify(names->from); };
  });
  add_action(*command, names, "merge", "Put whole tensors, of model and training, into one file", true)
      ->callback([names, &work] { work = [names] { merge(names->from, names->to); }; });
  add_action(*command, names, "convert",
             "The model of a checkpoint as Hugging Face's libraries read it, or such a model as a checkpoint", true)
      ->callback([names, &work] { work = [names] { convert(names->from, names->to); }; });
}

}  // namespace chorale::app
