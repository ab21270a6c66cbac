#include "chorale/nn/recurrent.h"

#include <cmath>

#include "chorale/api/api.h"
#include "chorale/nn/init.h"
#include "chorale/op/need_defined.h"

namespace chorale::nn {

Recurrent::Recurrent(int64_t gates, int64_t input_size, int64_t hidden_size, const RecurrentOptions& options)
    : input_size_(input_size), hidden_size_(hidden_size), options_(options) {
  CHORALE_CHECK(input_size > 0 && hidden_size > 0 && options.num_layers > 0,
                "[recurrent layer] expected positive sizes, found input ", input_size, ", hidden ", hidden_size, ", ",
                options.num_layers, " layers");
  CHORALE_CHECK(options.dropout >= 0 && options.dropout <= 1,
                "[recurrent layer] expected a dropout between 0 and 1, found ", options.dropout);
  const int64_t directions = options.bidirectional ? 2 : 1;
  const double bound = 1 / std::sqrt(static_cast<double>(hidden_size));
  const auto make = [&](const Shape& shape) { return Parameter(uniform(shape, -bound, bound)); };
  for (int64_t i = 0; i < options.num_layers * directions; ++i) {
    Weights& w = weights.emplace_back();
    w.ih = make({gates * hidden_size, i < directions ? input_size : directions * hidden_size});
    w.hh = make({gates * hidden_size, hidden_size});
    if (options.bias) w.bias_ih = make({gates * hidden_size});
    if (options.bias) w.bias_hh = make({gates * hidden_size});
  }
}

void Recurrent::visit_members(MemberVisitor& visitor) {
  const size_t directions = options_.bidirectional ? 2 : 1;
  for (size_t i = 0; i < weights.size(); ++i) {
    const std::string suffix = "_l" + std::to_string(i / directions) + (i % directions == 1 ? "_reverse" : "");
    visit_member(visitor, "weight_ih" + suffix, weights[i].ih);
    visit_member(visitor, "weight_hh" + suffix, weights[i].hh);
    visit_member(visitor, "bias_ih" + suffix, weights[i].bias_ih);
    visit_member(visitor, "bias_hh" + suffix, weights[i].bias_hh);
  }
}

std::string Recurrent::describe() const {
  return concat(input_size_, ", ", hidden_size_,
                options_.num_layers > 1 ? concat(", layers=", options_.num_layers) : "",
                options_.bidirectional ? ", bidirectional=true" : "", options_.batch_first ? ", batch_first=true" : "",
                options_.dropout > 0 ? concat(", dropout=", options_.dropout) : "");
}

Recurrent::Result Recurrent::run(const Tensor& x, const std::vector<Tensor>& state, const Step& step) const {
  need_whole();  // without weights nothing would be done
  op::need_defined(type_name(), "x", x);
  CHORALE_CHECK((x.dims() == 3 || x.dims() == 2) && x.size(-1) == input_size_, "[", type_name(), "] expected ",
                options_.batch_first ? "[batch, time, " : "[time, batch, ", input_size_, "] or [time, ", input_size_,
                "], found shape ", x.sizes());
  const bool single = x.dims() == 2;
  const size_t directions = options_.bidirectional ? 2 : 1;
  Tensor value = single ? unsqueeze(x, 1) : options_.batch_first ? transpose(x, 0, 1) : x;
  const int64_t T = value.size(0), B = value.size(1);  // time, batch
  CHORALE_CHECK(T > 0, "[", type_name(), "] expected at least one step of time, found shape ", x.sizes());
  const Shape state_shape = {static_cast<int64_t>(weights.size()), B, hidden_size_};
  std::vector<Tensor> first;
  for (const Tensor& part : state) {
    if (!part.defined()) {
      first.push_back(zeros(state_shape, x.dtype(), x.device()));
      continue;
    }
    first.push_back(single ? unsqueeze(part, 1) : part);
    CHORALE_CHECK(first.back().sizes() == state_shape, "[", type_name(), "] expected a state of shape ", state_shape,
                  " (without the batch for x without one), found ", part.sizes());
  }
  std::vector<std::vector<Tensor>> last(state.size());
  for (size_t layer = 0; layer * directions < weights.size(); ++layer) {
    if (layer > 0 && options_.dropout > 0) value = dropout(value, options_.dropout, is_training());
    std::vector<Tensor> outputs;
    for (size_t direction = 0; direction < directions; ++direction) {
      const size_t index = layer * directions + direction;
      const Weights& w = weights[index];
      // What depends on x alone is one product for all times.
      const std::vector<Tensor> gates = unbind(linear(value, w.ih, w.bias_ih), 0);
      std::vector<Tensor> now = first;
      for (Tensor& part : now) part = select(part, 0, static_cast<int64_t>(index));
      std::vector<Tensor> h(static_cast<size_t>(T));
      for (size_t i = 0; i < h.size(); ++i) {
        const size_t t = direction == 0 ? i : h.size() - 1 - i;
        step(w, gates[t], now);
        h[t] = now[0];
      }
      outputs.push_back(stack(h, 0));
      for (size_t k = 0; k < now.size(); ++k) last[k].push_back(now[k]);
    }
    value = directions == 1 ? outputs[0] : cat(outputs, 2);
  }
  Result result;
  result.output = single ? select(value, 1, 0) : options_.batch_first ? transpose(value, 0, 1) : value;
  for (const auto& parts : last) {
    const Tensor all = stack(parts, 0);
    result.state.push_back(single ? select(all, 1, 0) : all);
  }
  return result;
}

RecurrentOutput RNN::forward(const Tensor& x, const Tensor& h0) const {
  Result result = run(x, {h0}, [this](const Weights& w, const Tensor& x_gates, std::vector<Tensor>& state) {
    const Tensor sum = x_gates + linear(state[0], w.hh, w.bias_hh);
    state[0] = nonlinearity_ == RnnNonlinearity::kTanh ? tanh(sum) : relu(sum);
  });
  return {result.output, result.state[0]};
}

RecurrentOutput GRU::forward(const Tensor& x, const Tensor& h0) const {
  Result result = run(x, {h0}, [](const Weights& w, const Tensor& x_gates, std::vector<Tensor>& state) {
    const std::vector<Tensor> from_x = chunk(x_gates, 3, 1), from_h = chunk(linear(state[0], w.hh, w.bias_hh), 3, 1);
    const Tensor reset = sigmoid(from_x[0] + from_h[0]);
    const Tensor update = sigmoid(from_x[1] + from_h[1]);
    const Tensor fresh = tanh(from_x[2] + reset * from_h[2]);
    state[0] = lerp(fresh, state[0], update);
  });
  return {result.output, result.state[0]};
}

LstmOutput LSTM::forward(const Tensor& x, const LstmState& start) const {
  CHORALE_CHECK(start.h.defined() == start.c.defined(), "[LSTM] a state is h and c, or neither; ",
                start.h.defined() ? "c" : "h", " of this one is an undefined tensor");
  Result result = run(x, {start.h, start.c}, [](const Weights& w, const Tensor& x_gates, std::vector<Tensor>& state) {
    const std::vector<Tensor> gates = chunk(x_gates + linear(state[0], w.hh, w.bias_hh), 4, 1);
    state[1] = sigmoid(gates[1]) * state[1] + sigmoid(gates[0]) * tanh(gates[2]);
    state[0] = sigmoid(gates[3]) * tanh(state[1]);
  });
  return {result.output, {result.state[0], result.state[1]}};
}

}  // namespace chorale::nn
