// Fits a small network to a circle: which points lie inside?
#include <iostream>

#include "chorale/api/api.h"
#include "chorale/nn/nn.h"
#include "chorale/optim/optim.h"

using namespace chorale;

struct Net : nn::Module {
  nn::Linear hidden{2, 32}, out{32, 2};
  CHORALE_MODULE(Net, hidden, out)

  Tensor forward(const Tensor& x) { return out(relu(hidden(x))); }
};

int main() {
  const Tensor points = uniform({512, 2}, -1, 1);
  const Tensor inside = to(lt(sum(square(points), 1), 0.5), DType::kI64);
  Net net;
  optim::AdamW optimizer(net.named_parameters(), {.lr = 0.01});
  double loss = 0;
  for (int step = 0; step < 300; ++step) {
    optimizer.zero_grad();
    const Tensor error = cross_entropy(net(points), inside);
    backward(error);
    optimizer.step();
    loss = error.item<float>();
    if (step % 50 == 0) std::cout << "step " << step << "  loss " << loss << "\n";
  }
  const Tensor right = eq(argmax(net(points), 1), inside);
  std::cout << net << "\nright: " << 100 * mean(to(right, DType::kF32)).item<float>() << " %\n";
  return loss < 0.1 ? 0 : 1;
}
