// Our side of the cases that tools/oracle/record_modules.py records: how each module is made and called.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "chorale/nn/module.h"

namespace chorale::nn::oracle {

struct Case {
  std::shared_ptr<Module> module;
  std::vector<Tensor> in;  // from seeds 0, 1, …; floating ones ask for gradients
  std::function<std::vector<Tensor>(const std::vector<Tensor>&)> run;
};
// Made when asked for, so that each test pays for its own.
using Cases = std::map<std::string, std::function<Case()>>;

Cases layer_cases();
Cases sequence_cases();  // recurrent layers, attention
Cases loss_cases();

// ---- inputs, by the recorder's formulas

struct Input {
  std::function<Tensor(int seed)> make;
};
Input x(const Shape& sizes, double low = -1, double high = 1);
Input ints(const Shape& sizes, int64_t low = 0, int64_t high = 5);
Input fixed(const Tensor& value);

// A module with a call that is not m(in[0], in[1], …).
template <class M, class Call>
std::function<Case()> case_of(const std::function<M()>& make, const std::vector<Input>& inputs, Call call,
                              bool train = true) {
  return [=] {
    auto module = std::make_shared<M>(make());
    module->to(DType::kF64);
    module->train(train);
    Case result{module, {}, [module, call](const std::vector<Tensor>& in) { return tensors_of(call(*module, in)); }};
    for (size_t i = 0; i < inputs.size(); ++i) result.in.push_back(inputs[i].make(static_cast<int>(i)));
    return result;
  };
}
template <class M>
std::function<Case()> case_of(std::function<M()> make, std::vector<Input> inputs, bool train = true) {
  const auto call = [](M& module, const std::vector<Tensor>& in) {
    if constexpr (requires { module.forward(in[0], in[1], in[2]); }) {
      if (in.size() == 3) return module(in[0], in[1], in[2]);
    }
    if constexpr (requires { module.forward(in[0], in[1]); }) {
      if (in.size() == 2) return module(in[0], in[1]);
    }
    if constexpr (requires { module.forward(in[0]); }) {
      return module(in[0]);
    } else if constexpr (requires { module.forward(in[0], in[1]); }) {
      return module(in[0], in[1]);
    } else {
      return module(in[0], in[1], in[2]);
    }
  };
  return case_of<M>(std::move(make), std::move(inputs), call, train);
}

}  // namespace chorale::nn::oracle

// A case whose module is made by one constructor call: CHORALE_CASE(Linear(4, 3), {x({2, 5, 4})}).
#define CHORALE_CASE(expression, ...) \
  case_of<std::decay_t<decltype(expression)>>([] { return expression; }, __VA_ARGS__)
