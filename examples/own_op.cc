// An op of one's own, with a gradient written by hand: rounding whose gradient passes as if it were not there
// (a straight-through estimator), and what that is good for: weights that are whole numbers.
#include <iostream>

#include "chorale/chorale.h"

using namespace chorale;

// Rounds to a multiple of `step`.
class Quantize : public Function {
 public:
  explicit Quantize(double step) : step_(step) {}
  const char* name() const override { return "quantize"; }

  std::vector<Tensor> forward(const std::vector<Tensor>& in) override { return {round(in[0] / step_) * step_}; }
  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override { return {dout[0]}; }

 private:
  double step_;
};

// x * x * x in one op; backward reads what forward saved, and can be differentiated again because it is made of ops.
class Cube : public Function {
 public:
  const char* name() const override { return "cube"; }
  std::vector<Tensor> forward(const std::vector<Tensor>& in) override {
    save_for_backward({in[0]});
    return {in[0] * in[0] * in[0]};
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override {
    const Tensor& x = saved()[0];
    return {dout[0] * 3 * x * x};
  }
};

int main() {
  // Finds whole numbers w with x w = y.
  manual_seed(1);
  const Tensor x = normal({64, 3});
  const Tensor y = matmul(x, Tensor::from({2.0f, -1.0f, 5.0f}, {3}));
  const Tensor w = set_requires_grad(zeros({3}));
  optim::Adam optimizer({{"w", w}}, {.lr = 0.1});
  for (int step = 0; step < 200; ++step) {
    optimizer.zero_grad();
    backward(mse_loss(matmul(x, apply<Quantize>({w}, 1.0)[0]), y));
    optimizer.step();
  }
  const Tensor found = round(w);
  std::cout << "weights " << found << "\n";

  const Tensor z = set_requires_grad(Tensor::from({1.0, 2.0}, {2}));
  const Tensor first = grad({sum(apply<Cube>({z})[0])}, {z}, {.create_graph = true})[0];
  const Tensor second = grad({sum(first)}, {z})[0];
  std::cout << "cube: first derivative " << first << ", second " << second << "\n";
  const bool right = found.to_vector<float>() == std::vector<float>{2, -1, 5} &&
                     second.to_vector<double>() == std::vector<double>{6, 12};
  return right ? 0 : 1;
}
