// Checkpoints of several ranks: a folder that any other number of ranks, with any other split, can load again.
//
//   snapshot::State state = snapshot::state_of(model.named_parameters());
//   state.bytes["step"] = "120";
//   snapshot::save(group, "run/step-120", state);
//   …
//   snapshot::load(group, "run/step-120", state);  // in place
//
// A tensor that is spread over ranks is described by what each rank has of it: its key, the shape of the whole, where
// the part begins, and the part; state_of() knows that of sharded tensors. Saving writes every part once, load copies
// what a rank needs from wherever it was saved, reading no other bytes. All ranks of the group call the same function;
// a rank that fails makes all of them throw a CheckpointError that names it, and none waits for ever.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "chorale/comm/group.h"
#include "chorale/snapshot/plan.h"
#include "chorale/tensor/named_tensors.h"

namespace chorale::snapshot {

// Thrown on every rank when a step failed on some.
class CheckpointError : public StateError {
 public:
  CheckpointError(const std::string& step, std::map<int, std::string> failures);
  // What went wrong, by global rank.
  const std::map<int, std::string>& failures() const { return failures_; }

 private:
  std::map<int, std::string> failures_;
};

// What this rank has of a tensor.
struct TensorChunk {
  std::string key;
  Shape whole;
  Shape offsets;
  Tensor local;

  Region region() const { return {offsets, local.sizes()}; }
};

// What a rank saves or loads. A key may have several chunks. Ranks may have the same chunk (copies of one value: one of
// them is saved) and may have different keys.
struct State {
  std::vector<TensorChunk> chunks;
  std::map<std::string, std::string> bytes;  // what is no tensor; not empty
};
// What this rank has of tensors, under prefix + name: of a sharded one (sharding/sharded.h) its parts, of any other all
// of it. Chunks are views, so that what is loaded into them is in the tensor. InvalidArgument for partial values, which
// are no part of anything.
State state_of(const NamedTensors& tensors, const std::string& prefix = "");
// The same of one tensor, behind what `state` has.
void add_chunks(State& state, const std::string& key, const Tensor& x);

// The steps of a save and of a load, for code that watches them.
enum class Step : uint8_t { kPrepare, kPlan, kAgree, kWrite, kIndex, kRead };
const char* name_of(Step step);

// What becomes of the files of a checkpoint that a save into the same folder replaces.
enum class Replaced : uint8_t {
  kAuto,     // kept where files are memory of which plenty is free, else removed
  kRemoved,  // given back
  kKept,     // for the next save, which writes over them (replaced.h, Note [Room of replaced files])
};

struct SaveOptions {
  bool overwrite = true;  // false: an error where the folder has a checkpoint
  int coordinator = -1;   // the global rank that writes the index; -1: the group's first
  int threads = 1;        // files, and threads, for each rank
  Replaced replaced = Replaced::kAuto;
  // Called on each rank as a step begins; what it throws is a failure of this rank.
  std::function<void(Step)> on_step = {};
  // Called on the coordinator once the index is there, before any rank returns; what it throws is a failure too.
  std::function<void()> finish = {};
};
// Writes the state of all ranks into a folder, which the coordinator makes if need be. Ranks that do not see it (on a
// host with disks of its own) send the coordinator what only they have. An older checkpoint there is valid until the
// new one is complete, and stays if this fails. Warns of tensors of which ranks have copies that differ.
void save(const comm::Group& group, const std::filesystem::path& folder, const State& state,
          const SaveOptions& options = {});
// Saves from one process without a group.
void save(const std::filesystem::path& folder, const State& state, const SaveOptions& options = {});

// When the checksums of parts of which all is read are compared.
enum class Verify : uint8_t {
  kMeanwhile,  // in the same pass: after an error tensors have new, old and damaged values
  kFirst,      // before anything is written, on any rank: a second pass over the bytes, and nearly twice the time
  kNot,
};

struct LoadOptions {
  bool partial = false;  // keys that the checkpoint does not have are left alone instead of being an error
  Verify verify = Verify::kMeanwhile;
  std::function<void(Step)> on_step = {};
};
// Fills the tensors of `state` in place, converted to their dtypes, and replaces its bytes. What the checkpoint has
// beyond that is ignored. Nothing is written, on any rank, before the keys and shapes of all ranks are known to fit,
// and checksums to be right where they are compared first. The group's first rank reads for ranks that do not see the
// folder. Plain files count as a checkpoint too (find_index in index.h).
void load(const comm::Group& group, const std::filesystem::path& folder, State& state, const LoadOptions& options = {});
void load(const std::filesystem::path& folder, State& state, const LoadOptions& options = {});

// Throws InvalidArgument on every rank, naming ranks and keys, where one has a key that another has not: for states
// that are to be the same everywhere. save() and load() do not ask for it.
void check_same_keys(const comm::Group& group, const State& state);

// The index of a checkpoint (find_index in index.h), on every rank, whether it sees the folder or not.
Index index_of(const comm::Group& group, const std::filesystem::path& folder);

// New whole tensors with everything in a checkpoint whose key begins with `prefix`, or is wanted.
State read(const std::filesystem::path& folder, const std::string& prefix = "");
State read(const std::filesystem::path& folder, const std::function<bool(const std::string& key)>& is_wanted);

// What is wrong with a checkpoint's files: sizes and checksums of all parts; nothing where all is well. Throws
// InvalidArgument where there is none.
std::vector<std::string> verify(const std::filesystem::path& folder);

}  // namespace chorale::snapshot
