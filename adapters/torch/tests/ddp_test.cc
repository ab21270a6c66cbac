// What DistributedDataParallel for libtorch promises, on two ranks: chorale run -n 2 ./ddp_test FILE. Rank 0 writes the
// parameters after twenty steps to FILE; test_ddp_cpp.py compares them with those of PyTorch's own wrapper.
#include <fstream>
#include <iomanip>
#include <iostream>

#include "adapters/torch/csrc/allocator.h"
#include "adapters/torch/ddp.h"
#include "adapters/torch/sync_batch_norm.h"
#include "chorale/base/error.h"
#include "chorale/comm/world.h"

namespace {

using chorale::comm::Group;
using chorale_torch::DistributedDataParallel;
using torch::Tensor;

void check(bool holds, const std::string& what) {
  if (holds) return;
  std::cerr << "ddp_test: not so: " << what << std::endl;
  std::exit(1);
}
void check_close(const Tensor& a, const Tensor& b, const std::string& what) {
  std::ostringstream text;
  text << what << ": " << a << " and " << b;
  check(torch::allclose(a, b, 1e-5, 1e-6), text.str());
}

// The same numbers here and in test_ddp_cpp.py.
Tensor wave(at::IntArrayRef sizes, double start) {
  const int64_t count = c10::multiply_integers(sizes);
  return torch::sin(torch::arange(count, torch::kDouble) * 0.37 + start).to(torch::kFloat).view(sizes);
}
torch::nn::Sequential make_net() {
  torch::nn::Sequential net(torch::nn::Linear(6, 16), torch::nn::Tanh(), torch::nn::BatchNorm1d(16),
                            torch::nn::Linear(16, 3));
  const torch::NoGradGuard no_grad;
  double start = 0;
  for (auto& parameter : net->parameters()) parameter.copy_(wave(parameter.sizes(), start += 1) * 0.3);
  return net;
}
Tensor inputs(int step, int rank) { return wave({4, 6}, 10 + step + 0.5 * rank); }
Tensor answers(int step, int rank) { return wave({4, 3}, 20 + step + 0.5 * rank); }
Tensor average(const Group& group, const Tensor& own) {
  std::vector<float> values(own.data_ptr<float>(), own.data_ptr<float>() + own.numel());
  group.all_reduce(std::span(values), chorale::Reduce::kAverage).wait();
  return torch::tensor(values).view(own.sizes());
}

void twenty_steps(const Group& group, const char* file) {
  DistributedDataParallel ddp(make_net(), group, {.bucket_cap_mb = 0.0001});
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    torch::mse_loss(ddp(inputs(step, group.rank())), answers(step, group.rank())).backward();
    optimizer.step();
  }
  check(ddp.reducer().bucket_count() > 1, "gradients travel in several buckets");
  if (group.rank() != 0) return;
  std::ofstream out(file);
  out << std::setprecision(9);
  for (const auto& entry : ddp.named_parameters()) {
    check(entry.key().find("module") == std::string::npos, "names have no prefix: " + entry.key());
    const Tensor flat = entry.value().detach().flatten();
    for (int64_t i = 0; i < flat.numel(); ++i) out << flat[i].item<float>() << "\n";
  }
}

void parameters_become_those_of_rank_0(const Group& group) {
  torch::nn::Linear linear(3, 2);
  {
    const torch::NoGradGuard no_grad;
    linear->weight.fill_(1 + group.rank());
  }
  DistributedDataParallel ddp(linear, group);
  check_close(linear->weight, torch::ones({2, 3}), "weights of rank 0");
}

void no_sync_accumulates(const Group& group) {
  torch::nn::Linear linear(torch::nn::LinearOptions(3, 1).bias(false));
  DistributedDataParallel ddp(linear, group);
  const Tensor first = wave({2, 3}, group.rank()), second = wave({2, 3}, 5 + group.rank());
  {
    const auto scope = ddp.no_sync();
    ddp(first).sum().backward();
  }
  check_close(linear->weight.grad(), first.sum(0, true), "inside no_sync gradients are this rank's own");
  ddp(second).sum().backward();
  check_close(linear->weight.grad(), average(group, (first + second).sum(0, true)), "afterwards the average of all");
}

struct TwoWaysImpl : torch::nn::Module {
  TwoWaysImpl() {
    for (auto* way : {&a, &b}) *way = torch::nn::Linear(torch::nn::LinearOptions(2, 1).bias(false));
    register_module("a", a);
    register_module("b", b);
  }
  std::pair<Tensor, Tensor> forward(const Tensor& x, bool left) {
    const Tensor y = left ? a(x) : b(x);
    return {y, y * 2};
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(TwoWays);

void unused_parameters_are_found(const Group& group) {
  TwoWays net;
  DistributedDataParallel ddp(net, group);
  const Tensor x = wave({2, 2}, 1);
  for (int step = 0; step < 3; ++step) {
    ddp.zero_grad();
    ddp(x, group.rank() == 0).first.sum().backward();  // each rank its own way
    check_close(net->a->weight.grad(), x.sum(0, true) / group.size(), "used on rank 0 only");
    check_close(net->b->weight.grad(), x.sum(0, true) * (group.size() - 1) / group.size(), "used on the others");
  }
  ddp.zero_grad();
  ddp(x, true).first.sum().backward();
  check(!net->b->weight.grad().defined(), "what nobody uses has no gradient");
}

void hook_replaces_the_average(const Group& group) {
  torch::nn::Linear linear(torch::nn::LinearOptions(2, 1).bias(false));
  DistributedDataParallel ddp(linear, group);
  ddp.register_comm_hook({"sum of doubled", [](const chorale_torch::GradBucket& bucket) {
                            Tensor sum = bucket.buffer * 2;
                            auto work = bucket.group.all_reduce(
                                std::span(sum.data_ptr<float>(), static_cast<size_t>(sum.numel())));
                            return [sum, work] {
                              work.wait();
                              return sum;
                            };
                          }});
  const Tensor x = wave({2, 2}, group.rank());
  ddp(x).sum().backward();
  check_close(linear->weight.grad(), average(group, x.sum(0, true)) * 2 * group.size(), "what the hook returns");
}

void ranks_may_run_out_of_inputs(const Group& group) {
  torch::nn::Linear linear(torch::nn::LinearOptions(2, 1).bias(false));
  DistributedDataParallel ddp(linear, group);
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  chorale_torch::join({&ddp}, {}, [&] {
    for (int step = 0; step < 2 + 3 * group.rank(); ++step) {
      optimizer.zero_grad();
      ddp(wave({2, 2}, step)).sum().backward();
      optimizer.step();
    }
  });
  check_close(average(group, linear->weight.detach()), linear->weight.detach(), "all have the state of the last");
}

void sparse_gradients_are_averaged(const Group& group) {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(5, 2).sparse(true));
  DistributedDataParallel ddp(table, group);
  ddp(torch::tensor({0, group.rank() + 1})).sum().backward();
  const Tensor grad = table->weight.grad().to_dense();
  check(table->weight.grad().is_sparse(), "sparse stays sparse");
  check_close(grad[0], torch::ones({2}), "a row that all used");
  check_close(grad[1], torch::ones({2}) / group.size(), "a row that one used");
}

void sync_batch_norm_equals_the_whole_batch(const Group& group) {
  const Tensor whole = wave({6, 3, 4}, 0).requires_grad_(), dy = wave({6, 3, 4}, 9);
  torch::nn::BatchNorm1d plain(3);
  plain->forward(whole).mul(dy).sum().backward();
  torch::nn::Sequential net(torch::nn::BatchNorm1d(3));
  chorale_torch::convert_sync_batchnorm(*net, group);
  const int64_t from = group.rank() == 0 ? 0 : 2, count = group.rank() == 0 ? 2 : 4;  // parts of different sizes
  const Tensor part = whole.detach().narrow(0, from, count).clone().requires_grad_();
  net->forward(part).mul(dy.narrow(0, from, count)).sum().backward();
  check_close(part.grad(), whole.grad().narrow(0, from, count), "gradients of inputs");
  check_close(net->named_buffers()["0.running_var"], plain->running_var, "running variance");
  check_close(average(group, net->named_parameters()["0.weight"].grad()) * group.size(), plain->weight.grad(),
              "gradients of weights add up");
}

struct OwnClassImpl : torch::nn::Module {
  OwnClassImpl() { register_module("norm", norm); }
  torch::nn::BatchNorm2d norm{3};
};

void members_that_cannot_be_converted_are_named(const Group& group) {
  OwnClassImpl own;
  try {
    chorale_torch::convert_sync_batchnorm(own, group);
  } catch (const chorale::StateError& error) {
    return check(std::string(error.what()).find("norm is a member of") != std::string::npos, error.what());
  }
  check(false, "a StateError");
}

void different_modules_are_an_error(const Group& group) {
  try {
    DistributedDataParallel ddp(torch::nn::Linear(2 + group.rank(), 1), group);
  } catch (const chorale::StateError& error) {
    return check(std::string(error.what()).find("parameter 0 is weight, Float [1, ") != std::string::npos,
                 error.what());
  }
  check(false, "a StateError");
}

}  // namespace

int main(int argc, char** argv) {
  check(argc == 2, "one argument, the file for the parameters");
  chorale::comm::World world;
  world.init();
  const Group& group = world.group();
  twenty_steps(group, argv[1]);
  parameters_become_those_of_rank_0(group);
  no_sync_accumulates(group);
  unused_parameters_are_found(group);
  hook_replaces_the_average(group);
  ranks_may_run_out_of_inputs(group);
  sparse_gradients_are_averaged(group);
  sync_batch_norm_equals_the_whole_batch(group);
  members_that_cannot_be_converted_are_named(group);
  different_modules_are_an_error(group);
  chorale_torch::use_our_allocator();  // from here on tensors lie where peers can map them
  no_sync_accumulates(group);
  return 0;
}
