// Casts of a training step on a device, on a simulated one.
#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/codegen/fused.h"
#include "chorale/eager/sim_kernels.h"
#include "chorale/op/samples.h"
#include "chorale/op/update.h"

namespace chorale::codegen {
namespace {

Tensor parameter_of(const Shape& sizes, int seed, Device device) {
  return to(to(op::sample(sizes, seed, -1, 1), DType::kF32), device);
}
std::vector<float> floats_of(const Tensor& x) { return x.to_vector<float>(); }

// Two layers under autocast, trained by AdamW: weights are cast together, the update reads gradients as layers make
// them, and those that a caller sees are cast together (graph/passes/join_casts.h). The bits are those of the ops.
TEST(DeviceCasts, JoinedCastsHaveTheBitsOfTheOpsOneByOne) {
  eager::add_sim_device({.devices = 2});
  const Device device{DeviceType::kSim, 0};
  std::string text;
  const auto train = [&](bool compiled) {
    UpdateLists lists;
    for (const Shape& sizes : {Shape{8, 6}, {8}, {3, 8}, {3}}) {
      const auto seed = static_cast<int>(10 + lists.size());
      lists.parameters.push_back(parameter_of(sizes, seed, device));
      set_requires_grad(lists.parameters.back());
      lists.steps.push_back(zeros({}, DType::kI64, device));
      for (size_t s = 0; s < 2; ++s) lists.states[s].push_back(zeros(sizes, DType::kF32, device));
    }
    lists.lr = full({}, 0.01, DType::kF64, device);
    const std::vector<Tensor>& p = lists.parameters;
    const auto body = [&](const std::vector<Tensor>& in) {
      for (const Tensor& one : p) set_gradient(one, {});
      Tensor loss;
      {
        const Autocast scope(DType::kBF16);
        loss = mean(square(to(linear(tanh(linear(in[0], p[0], p[1])), p[2], p[3]), DType::kF32)));
      }
      backward(loss);
      std::vector<Tensor> results = {detach(loss)};
      const NoGrad quiet;
      lists.gradients.clear();
      for (const Tensor& one : p) lists.gradients.push_back(gradient(one));
      adam_(lists, {.weight_decay = 0.1, .decoupled = true});
      results.insert(results.end(), lists.gradients.begin(), lists.gradients.end());
      return results;
    };
    auto step = compile(body, {.whole_graph = true, .backend = [&](graph::Graph graph, const compiled::GraphInfo&) {
                                 auto program = fuse_and_compile(std::move(graph));
                                 text = graph::print(program->graph());
                                 return program;
                               }});
    std::vector<std::vector<float>> found;
    for (int i = 0; i < 3; ++i) {
      const std::vector<Tensor> in{parameter_of({4, 6}, 20 + i, device)};
      for (const Tensor& x : compiled ? step(in) : body(in)) found.push_back(floats_of(x));
    }
    for (const auto* const list : {&lists.parameters, &lists.states[0], &lists.states[1]}) {
      for (const Tensor& x : *list) found.push_back(floats_of(x));
    }
    return found;
  };
  const auto expected = train(false);
  EXPECT_EQ(train(true), expected);
  for (const char* const part : {" = to_each(%0, %1, %2, %3, %4) {dtype=bf16", ") {dtype=f32, keep_layout=false}\n"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in\n" << text;
}

}  // namespace
}  // namespace chorale::codegen
