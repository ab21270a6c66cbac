// Checkpoints of a run: all that is needed to go on bit for bit, or with other ranks. Each is a folder,
//
//   checkpoints/step-00001000/
//     index.json, rank-0-….safetensors, …   model and training, as any number of ranks loads it (snapshot/snapshot.h)
//     config.json, vocab.json, …            whatever the task adds
//     manifest.json                         step, options, and size and SHA-256 of every file that the index does not
//                                           name, and of itself
//
// that is written under another name, made durable and then renamed: whenever the process ends, the folders under these
// names are whole. Keys without a slash are the model's; "optimizer/…", "schedule/…" and "scale/…" say how it is
// trained, "rank-0/…" what a rank knows by itself. Checkpoints of before there was an index (model.safetensors,
// training.safetensors) load as well.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "chorale/json/json.h"
#include "chorale/tensor/named_tensors.h"

namespace chorale::train {

struct Checkpoint {
  int64_t step = 0;
  std::string data;        // Task::fingerprint()
  json::Object options{};  // of the run, for readers of the folder
};

class Checkpoints {
 public:
  // The checkpoints in the folder of a run. Readers need no lock: a checkpoint is there as a whole or not at all.
  explicit Checkpoints(const std::filesystem::path& run);

  // Removes what a process that was killed left half-written; only for the owner of the run's lock.
  void remove_unfinished() const;

  // The folder that a checkpoint of this step is written into, new and empty.
  std::filesystem::path begin(int64_t step) const;
  // All but the manifest is there: writes it, gives the folder its name, in place of one of the same step, and removes
  // all checkpoints but the last `keep`. One that is damaged, or in which somebody has put something, stays.
  void finish(const Checkpoint& checkpoint, int64_t keep) const;
  // Their folders, the oldest first.
  std::vector<std::filesystem::path> list() const;

 private:
  std::filesystem::path folder_;
};

// Compares every file with the manifest and the index. Throws InvalidArgument that names the file which is damaged or
// missing.
Checkpoint load_checkpoint(const std::filesystem::path& folder);

// The last checkpoint of a run. Where it is damaged: with `or_previous` the last that is not, after a warning for each
// that is passed over; otherwise an InvalidArgument that names the file and says what can be done. Nothing where there
// is none.
struct FoundCheckpoint {
  std::filesystem::path folder;
  Checkpoint checkpoint;
};
std::optional<FoundCheckpoint> find_checkpoint(const Checkpoints& checkpoints, bool or_previous);

// What the last checkpoint whose manifest is whole says of the run's options; other files are not looked at.
struct FoundOptions {
  std::filesystem::path manifest;
  json::Object options;
};
std::optional<FoundOptions> last_options(const Checkpoints& checkpoints);

// The weights in a folder: of a checkpoint, or of a model in Hugging Face's form.
NamedTensors model_tensors(const std::filesystem::path& folder);

}  // namespace chorale::train
