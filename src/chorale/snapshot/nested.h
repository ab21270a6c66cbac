// Nested states as flat ones: what is in maps and lists gets a key that says where it is, "model.layers.0.weight".
#pragma once

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale::snapshot {

struct Nested;
using NestedMap = std::map<std::string, Nested>;
using NestedList = std::vector<Nested>;
// Bytes, a tensor, or a collection of such.
struct Nested {
  std::variant<std::string, Tensor, NestedMap, NestedList> value;
};

// The way to a value: names in maps, places in lists.
using NestedPath = std::vector<std::variant<std::string, int64_t>>;

struct Flattened {
  std::map<std::string, Nested> values;     // what is no collection; and collections that are empty
  std::map<std::string, NestedPath> paths;  // of the same keys: a name may have dots in it
};
// InvalidArgument where two values would get one key.
Flattened flatten(const Nested& nested);
// The exact inverse. Tensors are the same ones.
Nested unflatten(const Flattened& flat);

}  // namespace chorale::snapshot
