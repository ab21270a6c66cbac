// Checkpoints of a run: all that is needed to go on bit for bit. Each is a folder,
//
//   checkpoints/step-00001000/
//     model.safetensors      the model, with whatever the task adds (config.json, vocab.json, …)
//     training.safetensors   optimizer, schedule, loss scale
//     rank-0.safetensors …   what ranks know by themselves; only where there is such a thing
//     manifest.json          step, options, random streams, and size and SHA-256 of every other file and of itself
//
// that is written under another name, made durable and then renamed: whenever the process ends, the folders under these
// names are whole.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "chorale/base/philox.h"
#include "chorale/io/sharded.h"
#include "chorale/json/json.h"

namespace chorale::train {

struct Checkpoint {
  int64_t step = 0;
  std::string data;                      // Task::fingerprint()
  json::Object options{};                // of the run, for readers of the folder
  std::vector<RandomStream> random{};    // of each rank
  NamedTensors training{};               // the same on all ranks
  std::vector<NamedTensors> of_ranks{};  // of each rank; or nothing
};

class Checkpoints {
 public:
  // In the folder of a run. Readers need no lock: a checkpoint is there as a whole or not at all.
  explicit Checkpoints(const std::filesystem::path& run);

  // Removes what a process that was killed left half-written; only for the owner of the run's lock.
  void remove_unfinished() const;

  // Writes a checkpoint, then removes all but the last `keep`. `save_model` writes the model's files into a folder. A
  // checkpoint of the same step is replaced.
  void save(const Checkpoint& checkpoint, const std::function<void(const std::filesystem::path&)>& save_model,
            int64_t keep) const;
  // Their folders, the oldest first.
  std::vector<std::filesystem::path> list() const;

 private:
  std::filesystem::path folder_;
};

// Reads all but the model, after comparing every file with the manifest. Throws InvalidArgument that names the file
// which is damaged or missing. Tensors lie on the mapped files.
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

}  // namespace chorale::train
