// Checkpoints of objects that know their own state: optimizers, schedules, generators, the place of a data loader.
//
//   snapshot::Objects objects;
//   objects["optimizer"] = snapshot::stateful(optimizer);
//   objects["loader"] = {.state = [&] { … }, .load = [&](const snapshot::State& state) { … }};
//   snapshot::save_objects(group, folder, objects, state);
#pragma once

#include <functional>
#include <map>
#include <string>

#include "chorale/snapshot/snapshot.h"

namespace chorale::snapshot {

struct Stateful {
  // What there is to save. Before a load it is asked, too: the load fills this very memory.
  std::function<State()> state;
  // Called after a load with what state() gave, filled. May be empty where filling is enough.
  std::function<void(const State&)> load{};
};
using Objects = std::map<std::string, Stateful>;

// Makes a Stateful of anything with state_dict() and load_state_dict(). The object must outlive the result, and have
// its state before a load: an optimizer that has made no step has none yet, unless a step with gradients of zero makes
// it.
template <class Object>
Stateful stateful(Object& object) {
  return {.state = [&object] { return state_of(object.state_dict()); },
          .load =
              [&object](const State& state) {
                NamedTensors tensors;
                tensors.reserve(state.chunks.size());
                for (const TensorChunk& chunk : state.chunks) tensors.emplace_back(chunk.key, chunk.local);
                object.load_state_dict(tensors);
              }};
}

// Saves and loads `rest` with what the objects have, whose keys get the object's name and a slash in front. Ranks may
// have different objects, in any order: all of them visit these in the order of the names that any rank has, so that an
// object may call collectives of its own.
void save_objects(const comm::Group& group, const std::filesystem::path& folder, const Objects& objects,
                  const State& rest = {}, const SaveOptions& options = {});
void load_objects(const comm::Group& group, const std::filesystem::path& folder, const Objects& objects, State& rest,
                  const LoadOptions& options = {});

}  // namespace chorale::snapshot
