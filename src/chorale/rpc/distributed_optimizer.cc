#include "chorale/rpc/distributed_optimizer.h"

namespace chorale::rpc::detail {
namespace {

std::mutex& steps() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

BorrowedGradients::BorrowedGradients(const std::vector<Tensor>& parameters, dist_autograd::Contexts& contexts,
                                     uint64_t context)
    : lock_(steps()), parameters_(parameters) {
  autograd::GradientMap& gradients = contexts.get(context)->gradients;
  for (const Tensor& parameter : parameters_) {
    before_.push_back(gradient(parameter));
    set_gradient(parameter, gradients.gradient(parameter));
  }
}

BorrowedGradients::~BorrowedGradients() {
  for (size_t i = 0; i < before_.size(); ++i) set_gradient(parameters_[i], before_[i]);
}

NamedTensors named(const std::vector<RRef<Tensor>>& parameters) {
  NamedTensors list;
  for (size_t i = 0; i < parameters.size(); ++i) list.emplace_back(concat(i), parameters[i].local_value());
  return list;
}

}  // namespace chorale::rpc::detail
