// Recurrent layers: RNN, GRU and LSTM, of several layers and in both directions, with PyTorch's parameter names
// (weight_ih_l0, bias_hh_l1_reverse, …).
#pragma once

#include <vector>

#include "chorale/nn/module.h"

namespace chorale::nn {

struct RecurrentOptions {
  int64_t num_layers = 1;
  bool bias = true;
  bool batch_first = false;  // x and the output are [batch, time, ..] instead of [time, batch, ..]
  double dropout = 0;        // between layers, in training
  bool bidirectional = false;
};

// What the recurrent layers share. All parameters are uniform in +-1 / sqrt(hidden_size).
class Recurrent : public Module {
 public:
  void visit_members(MemberVisitor& visitor) override;
  std::string describe() const override;

  // The weights of one layer in one direction, with the gates one below the other.
  struct Weights {
    Parameter ih;  // [gates * hidden, input]
    Parameter hh;  // [gates * hidden, hidden]
    Parameter bias_ih, bias_hh;
  };
  // Layer 0, its reverse if there is one, layer 1, …
  std::vector<Weights> weights;

 protected:
  Recurrent(int64_t gates, int64_t input_size, int64_t hidden_size, const RecurrentOptions& options);
  // One step of one direction: from gates [batch, gates * hidden], computed from x, to the next state.
  using Step = std::function<void(const Weights& w, const Tensor& x_gates, std::vector<Tensor>& state)>;
  struct Result {
    Tensor output;
    std::vector<Tensor> state;
  };
  // `state` has as many tensors [layers * directions, batch, hidden] as a step keeps; undefined ones are zeros.
  Result run(const Tensor& x, const std::vector<Tensor>& state, const Step& step) const;

  int64_t input_size_, hidden_size_;
  RecurrentOptions options_;
};

struct RecurrentOutput {
  Tensor output;  // [time, batch, directions * hidden]: the last layer's state at every time
  Tensor h;       // [layers * directions, batch, hidden]: every layer's last state
  CHORALE_TENSORS(RecurrentOutput, output, h)
};

enum class RnnNonlinearity : uint8_t { kTanh, kRelu };
// h' = tanh(x weight_ih^T + bias_ih + h weight_hh^T + bias_hh). x is [time, batch, input] or [time, input].
class RNN : public Recurrent {
 public:
  RNN(int64_t input_size, int64_t hidden_size, const RecurrentOptions& options = {},
      RnnNonlinearity nonlinearity = RnnNonlinearity::kTanh)
      : Recurrent(1, input_size, hidden_size, options), nonlinearity_(nonlinearity) {}
  RecurrentOutput forward(const Tensor& x, const Tensor& h0 = {}) const;
  CHORALE_MODULE_CALL(RNN)

 private:
  RnnNonlinearity nonlinearity_;
};

// Gates: reset, update, new; h' = (1 - update) new + update h.
class GRU : public Recurrent {
 public:
  GRU(int64_t input_size, int64_t hidden_size, const RecurrentOptions& options = {})
      : Recurrent(3, input_size, hidden_size, options) {}
  RecurrentOutput forward(const Tensor& x, const Tensor& h0 = {}) const;
  CHORALE_MODULE_CALL(GRU)
};

struct LstmState {
  Tensor h, c;  // [layers * directions, batch, hidden]
  CHORALE_TENSORS(LstmState, h, c)
};
struct LstmOutput {
  Tensor output;
  LstmState state;
  CHORALE_TENSORS(LstmOutput, output, state)
};
// Gates: input, forget, cell, output; c' = forget c + input cell, h' = output tanh(c').
class LSTM : public Recurrent {
 public:
  LSTM(int64_t input_size, int64_t hidden_size, const RecurrentOptions& options = {})
      : Recurrent(4, input_size, hidden_size, options) {}
  LstmOutput forward(const Tensor& x, const LstmState& state = {}) const;
  CHORALE_MODULE_CALL(LSTM)
  // lstm(x, {h, c}): a list in braces has no type that the general form could find out.
  LstmOutput operator()(const Tensor& x, const LstmState& state) const { return nn::call(*this, x, state); }
};

}  // namespace chorale::nn
