// Checkpoints of objects that know their own state: optimizers, schedules, generators, the place of a data loader.
//
//   snapshot::Objects objects;
//   objects["optimizer"] = snapshot::stateful(optimizer);
//   objects["loader"] = snapshot::stateful(loader);
//   objects["mine"] = {.state = [&] { … }, .load = [&](const snapshot::State& state) { … }};
//   snapshot::save_objects(group, folder, objects, state);
#pragma once

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "chorale/base/generator.h"
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
  // Sharded tensors as wholes, of which chunks are only this rank's part.
  const auto filled = std::make_shared<NamedTensors>();
  return {.state =
              [&object, filled] {
                *filled = object.state_dict();
                return state_of(*filled);
              },
          .load = [&object, filled](const State&) { object.load_state_dict(std::exchange(*filled, {})); }};
}

// Where a generator is in its stream. Ranks whose generators differ give theirs names of their own.
Stateful stateful(Generator& generator);

// Whole numbers as the state of an object.
using Numbers = std::map<std::string, int64_t>;
State state_of_numbers(const Numbers& numbers);
// InvalidArgument where it has no such number.
int64_t number_in(const State& state, const std::string& key);

// A data loader (data/loader.h): the epoch in which it is, and how many batches of it were handed out.
template <class Loader>
concept HasPlace = requires(Loader& loader) {
  loader.load_state(loader.state());
  { loader.state().epoch } -> std::convertible_to<int64_t>;
};
template <HasPlace Loader>
Stateful stateful(Loader& loader) {
  return {.state =
              [&loader] {
                const auto place = loader.state();
                return state_of_numbers({{"seed", static_cast<int64_t>(place.seed)},
                                         {"epoch", place.epoch},
                                         {"batch", place.batch},
                                         {"batches", place.batches}});
              },
          .load =
              [&loader](const State& state) {
                auto place = loader.state();
                place.seed = static_cast<uint64_t>(number_in(state, "seed"));
                place.epoch = number_in(state, "epoch");
                place.batch = number_in(state, "batch");
                place.batches = number_in(state, "batches");
                loader.load_state(place);
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
