// The names that tests/oracle/*.json use, and what they call here.
#pragma once

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale::oracle {

using Json = nlohmann::json;
using In = const std::vector<Tensor>&;
using Call = std::function<std::vector<Tensor>(In, const Json& args)>;
using Calls = std::map<std::string, Call>;

Calls pointwise_calls();
Calls structured_calls();  // reductions, products, shapes, indices, order
Calls nn_calls();

// A list of integers, or one.
std::vector<int64_t> ints(const Json& value);

}  // namespace chorale::oracle
