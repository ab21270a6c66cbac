#include "chorale/snapshot/stateful.h"

#include <charconv>
#include <set>

#include "chorale/base/error.h"
#include "chorale/snapshot/agreement.h"

namespace chorale::snapshot {
namespace {

// The names that any rank has, in order.
std::set<std::string> agreed_names(const comm::Group& group, const Objects& objects) {
  const std::vector<comm::Value> all = everywhere(group, Step::kPrepare, {}, [&]() -> comm::Value {
    comm::List names;
    for (const auto& [name, object] : objects) names.emplace_back(name);
    return names;
  });
  std::set<std::string> names;
  for (const comm::Value& list : all) {
    for (const comm::Value& name : list.as<comm::List>()) names.insert(name.as<std::string>());
  }
  return names;
}

// Where in a state an object's part is.
struct Part {
  const Stateful* object;
  size_t first, last;  // chunks
  std::vector<std::string> bytes;
  std::string prefix;
};

// What the objects have, behind `all`. What an object throws is thrown by every rank.
std::vector<Part> add_objects(const comm::Group& group, const Objects& objects, State& all) {
  std::vector<Part> parts;
  for (const std::string& name : agreed_names(group, objects)) {
    everywhere(group, Step::kPlan, {}, [&]() -> comm::Value {
      const auto found = objects.find(name);
      if (found == objects.end()) return {};
      const State own = found->second.state();
      Part part{&found->second, all.chunks.size(), all.chunks.size() + own.chunks.size(), {}, name + "/"};
      for (TensorChunk chunk : own.chunks) {
        chunk.key = part.prefix + chunk.key;
        all.chunks.push_back(std::move(chunk));
      }
      for (const auto& [key, bytes] : own.bytes) {
        CHORALE_CHECK(all.bytes.emplace(part.prefix + key, bytes).second, "[checkpoint] there are two values called ",
                      part.prefix, key);
        part.bytes.push_back(key);
      }
      parts.push_back(std::move(part));
      return {};
    });
  }
  return parts;
}

}  // namespace

State state_of_numbers(const Numbers& numbers) {
  State state;
  for (const auto& [key, number] : numbers) state.bytes[key] = std::to_string(number);
  return state;
}

int64_t number_in(const State& state, const std::string& key) {
  const auto found = state.bytes.find(key);
  CHORALE_CHECK(found != state.bytes.end(), "[checkpoint] an object's state has no ", key);
  const std::string& text = found->second;
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  CHORALE_CHECK(error == std::errc() && end == text.data() + text.size(), "[checkpoint] the ", key,
                " of an object is no whole number: '", text.substr(0, 40), "'");
  return number;
}

Stateful stateful(Generator& generator) {
  return {.state =
              [&generator] {
                const RandomStream at = generator.state();
                return state_of_numbers(
                    {{"seed", static_cast<int64_t>(at.seed)}, {"offset", static_cast<int64_t>(at.offset)}});
              },
          .load =
              [&generator](const State& state) {
                generator.restore({static_cast<uint64_t>(number_in(state, "seed")),
                                   static_cast<uint64_t>(number_in(state, "offset"))});
              }};
}

void save_objects(const comm::Group& group, const std::filesystem::path& folder, const Objects& objects,
                  const State& rest, const SaveOptions& options) {
  State all = rest;
  add_objects(group, objects, all);
  save(group, folder, all, options);
}

void load_objects(const comm::Group& group, const std::filesystem::path& folder, const Objects& objects, State& rest,
                  const LoadOptions& options) {
  State all = rest;
  const std::vector<Part> parts = add_objects(group, objects, all);
  load(group, folder, all, options);
  for (auto& [key, bytes] : rest.bytes) bytes = all.bytes.at(key);
  auto part = parts.begin();
  for (const std::string& name : agreed_names(group, objects)) {
    everywhere(group, Step::kRead, {}, [&]() -> comm::Value {
      if (!objects.contains(name)) return {};
      const Part& mine = *part++;
      State own;
      for (size_t i = mine.first; i < mine.last; ++i) {
        own.chunks.push_back(all.chunks[i]);
        own.chunks.back().key.erase(0, mine.prefix.size());
      }
      for (const std::string& key : mine.bytes) own.bytes[key] = all.bytes.at(mine.prefix + key);
      if (mine.object->load) mine.object->load(own);
      return {};
    });
  }
}

}  // namespace chorale::snapshot
