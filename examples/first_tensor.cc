// Tensors, functions of them, and gradients.
#include <iostream>

#include "chorale/api/api.h"

using namespace chorale;

int main() {
  const Tensor x = Tensor::from({1.0f, 2.0f, 3.0f}, {3});
  std::cout << exp(x) * 2 << "\n";
  std::cout << matmul(full({2, 3}, 0.5), reshape(x, {3, 1})) << "\n";

  const Tensor w = set_requires_grad(zeros({3}));
  const Tensor loss = sum(square(w - x));
  backward(loss);
  std::cout << "loss " << loss.item<float>() << ", gradient " << gradient(w) << "\n";  // 2 (w - x)
}
