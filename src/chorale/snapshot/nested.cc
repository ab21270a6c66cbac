#include "chorale/snapshot/nested.h"

#include "chorale/base/error.h"

namespace chorale::snapshot {
namespace {

void flatten_into(Flattened& flat, const Nested& value, const NestedPath& path, const std::string& key) {
  const auto below = [&](NestedPath::value_type step, const std::string& name, const Nested& inner) {
    NestedPath longer = path;
    longer.push_back(std::move(step));
    flatten_into(flat, inner, longer, key.empty() ? name : concat(key, ".", name));
  };
  if (const auto* map = std::get_if<NestedMap>(&value.value); map && !map->empty()) {
    for (const auto& [name, inner] : *map) below(name, name, inner);
    return;
  }
  if (const auto* list = std::get_if<NestedList>(&value.value); list && !list->empty()) {
    int64_t place = 0;
    for (const Nested& inner : *list) {
      below(place, std::to_string(place), inner);
      ++place;
    }
    return;
  }
  CHORALE_CHECK(flat.values.emplace(key, value).second, "[checkpoint] two values of a nested state have the key ", key,
                "; rename one of them");
  flat.paths.emplace(key, path);
}

// A map or a list while it is put together.
struct Node {
  std::map<std::string, Node> names;
  std::map<int64_t, Node> places;
  const Nested* leaf = nullptr;

  Nested value() const {
    if (leaf) return *leaf;
    if (!places.empty()) {
      NestedList list;
      list.reserve(places.size());
      for (const auto& [place, node] : places) list.push_back(node.value());
      return {std::move(list)};
    }
    NestedMap map;
    for (const auto& [name, node] : names) map.emplace(name, node.value());
    return {std::move(map)};
  }
};

}  // namespace

Flattened flatten(const Nested& nested) {
  Flattened flat;
  flatten_into(flat, nested, {}, "");
  return flat;
}

Nested unflatten(const Flattened& flat) {
  Node root;
  for (const auto& [key, value] : flat.values) {
    const auto path = flat.paths.find(key);
    CHORALE_CHECK(path != flat.paths.end(), "[checkpoint] nothing says where in a nested state ", key, " belongs");
    Node* node = &root;
    for (const auto& step : path->second) {
      node = std::holds_alternative<int64_t>(step) ? &node->places[std::get<int64_t>(step)]
                                                   : &node->names[std::get<std::string>(step)];
    }
    node->leaf = &value;
  }
  return root.value();
}

}  // namespace chorale::snapshot
