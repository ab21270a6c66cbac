#include "../sync_batch_norm.h"

#include "../csrc/convert.h"
#include "chorale/base/error.h"

namespace chorale_torch {
namespace {

using at::Tensor;
using SharedGroup = std::shared_ptr<const chorale::comm::Group>;

// All dimensions but the channels.
std::vector<int64_t> places(const Tensor& x) {
  std::vector<int64_t> dims{0};
  for (int64_t d = 2; d < x.dim(); ++d) dims.push_back(d);
  return dims;
}
// [C] as [C, 1, …], which broadcasts to x [N, C, …].
Tensor per_channel(const Tensor& values, const Tensor& x) {
  std::vector<int64_t> sizes(static_cast<size_t>(x.dim()) - 1, 1);
  sizes[0] = values.numel();
  return values.view(sizes);
}

// With z = (x - mean) * rstd:
//   y = z * weight + bias
//   dx = (dy - avg(dy) - z * avg(dy * z)) * rstd * weight, averages over all ranks
//   dweight = sum(dy * z), dbias = sum(dy), over this rank
struct Normalize final : torch::autograd::Function<Normalize> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight,
                        const Tensor& bias, const Tensor& mean, const Tensor& rstd, double count, SharedGroup group) {
    context->save_for_backward({x, weight, mean, rstd});
    context->saved_data["count"] = count;
    context->saved_data["group"] = at::IValue::make_capsule(c10::make_intrusive<Held>(std::move(group)));
    Tensor y = (x - per_channel(mean, x)) * per_channel(weight.defined() ? rstd * weight : rstd, x);
    if (bias.defined()) y += per_channel(bias, x);
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list dout) {
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &mean = saved[2], &rstd = saved[3], &dy = dout[0];
    const double count = context->saved_data["count"].toDouble();
    const auto held = context->saved_data["group"].toCapsule();
    const auto& group = static_cast<const Held&>(*held).group;
    const Tensor z = (x - per_channel(mean, x)) * per_channel(rstd, x);
    const Tensor sums = at::stack({dy.sum(places(x)), (dy * z).sum(places(x))});
    Tensor averages = sums.clone();
    group->all_reduce(view_of(averages)).wait();
    averages /= count;
    const Tensor dx = (dy - per_channel(averages[0], x) - z * per_channel(averages[1], x)) *
                      per_channel(weight.defined() ? rstd * weight : rstd, x);
    return {dx, weight.defined() ? sums[1] : Tensor(), weight.defined() ? sums[0] : Tensor(), {}, {}, {}, {}};
  }
  // Keeps the group for a backward that may outlive the layer.
  struct Held final : torch::CustomClassHolder {
    explicit Held(SharedGroup shared) : group(std::move(shared)) {}
    SharedGroup group;
  };
};

// The number of values per channel, their mean and their variance, over all ranks. Every rank adds up the same rows in
// the same order (Chan's formula, which loses no accuracy to a large mean), so all get the same bits.
struct Moments {
  double count = 0;
  Tensor mean, variance;
};
Moments moments_of_all_ranks(const chorale::comm::Group& group, const Tensor& x) {
  const int64_t channels = x.size(1);
  const double own_count = static_cast<double>(x.numel()) / static_cast<double>(channels);
  const Tensor row = at::zeros({1 + 2 * channels}, at::kDouble);
  if (own_count > 0) {
    const auto [variance, mean] = at::var_mean(x.to(at::kDouble), places(x), /*unbiased=*/false);
    row[0] = own_count;
    row.narrow(0, 1, channels).copy_(mean);
    row.narrow(0, 1 + channels, channels).copy_(variance * own_count);
  }
  const Tensor rows = at::empty({group.size(), 1 + 2 * channels}, at::kDouble);
  group.all_gather_into(view_of(rows), view_of(row)).wait();
  Moments all{0, at::zeros({channels}, at::kDouble), at::zeros({channels}, at::kDouble)};
  for (int64_t r = 0; r < group.size(); ++r) {
    const double count = rows[r][0].item<double>();
    if (count == 0) continue;
    const Tensor delta = rows[r].narrow(0, 1, channels) - all.mean;
    const double total = all.count + count;
    all.mean += delta * (count / total);
    all.variance += rows[r].narrow(0, 1 + channels, channels) + delta * delta * (all.count * count / total);
    all.count = total;
  }
  CHORALE_CHECK(all.count > 1, "[SyncBatchNorm] ", all.count, " values per channel among all ", group.size(),
                " ranks have no variance; train with more samples");
  all.variance /= all.count;
  return all;
}

}  // namespace

void SyncBatchNormImpl::_check_input_dim(const Tensor& input) {
  CHORALE_CHECK(input.dim() >= 2 && input.size(1) == options.num_features(), "[SyncBatchNorm] expected [N, ",
                options.num_features(), ", …], found ", input.dim(), " dimensions",
                input.dim() >= 2 ? chorale::concat(" and ", input.size(1), " channels") : std::string());
}

Tensor SyncBatchNormImpl::forward(const Tensor& input) {
  _check_input_dim(input);
  const bool own_statistics = is_training() || !options.track_running_stats();
  if (!own_statistics || group_->size() < 2) {
    return at::batch_norm(input, weight, bias, running_mean, running_var, own_statistics,
                          options.momentum().value_or(0.1), options.eps(), /*cudnn_enabled=*/false);
  }
  Moments moments;
  {
    const at::NoGradGuard no_grad;
    moments = moments_of_all_ranks(*group_, input);
    if (is_training() && options.track_running_stats()) {
      num_batches_tracked += 1;
      const double momentum = options.momentum().value_or(1.0 / num_batches_tracked.item<double>());
      running_mean.lerp_(moments.mean.to(running_mean.scalar_type()), momentum);
      running_var.lerp_((moments.variance * (moments.count / (moments.count - 1))).to(running_var.scalar_type()),
                        momentum);
    }
  }
  const Tensor mean = moments.mean.to(input.scalar_type());
  const Tensor rstd = (moments.variance + options.eps()).rsqrt().to(input.scalar_type());
  return Normalize::apply(input, weight, bias, mean, rstd, moments.count, group_);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "chorale_torch::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps() << ", "
         << group_->size() << " ranks)";
}

// ---- conversion

namespace {

// The layer that takes over from `part`; null if that is no batch norm.
template <class Norm>
std::shared_ptr<SyncBatchNormImpl> taken_over(torch::nn::Module& part, const SharedGroup& group) {
  auto* norm = part.as<Norm>();
  if (!norm) return nullptr;
  auto synced = std::make_shared<SyncBatchNormImpl>(norm->options, group);
  // The tensors themselves, so that optimizers that have them go on with them.
  for (const auto& entry : norm->named_parameters()) synced->named_parameters()[entry.key()].set_data(entry.value());
  for (const auto& entry : norm->named_buffers()) synced->named_buffers()[entry.key()].set_data(entry.value());
  synced->train(norm->is_training());
  return synced;
}
std::shared_ptr<SyncBatchNormImpl> taken_over(torch::nn::Module& part, const SharedGroup& group) {
  if (auto synced = taken_over<torch::nn::BatchNorm1dImpl>(part, group)) return synced;
  if (auto synced = taken_over<torch::nn::BatchNorm2dImpl>(part, group)) return synced;
  return taken_over<torch::nn::BatchNorm3dImpl>(part, group);
}

void convert(torch::nn::Module& module, const std::string& path, const SharedGroup& group) {
  auto* sequence = module.as<torch::nn::SequentialImpl>();
  size_t at = 0;
  for (const auto& child : module.named_children()) {
    const std::string name = path + child.key();
    const auto synced = taken_over(*child.value(), group);
    CHORALE_CHECK_STATE(!synced || sequence, "[SyncBatchNorm] ", name, " is a member of ", module.name(),
                        " and cannot be replaced, since its forward is not virtual; declare it as a "
                        "chorale_torch::SyncBatchNorm");
    if (synced) {
      *(sequence->begin() + static_cast<std::ptrdiff_t>(at)) = torch::nn::AnyModule(synced);
      sequence->replace_module(child.key(), synced);
    } else {
      convert(*child.value(), name + ".", group);
    }
    ++at;
  }
}

}  // namespace

void convert_sync_batchnorm(torch::nn::Module& module, const chorale::comm::Group& group) {
  convert(module, "", std::make_shared<const chorale::comm::Group>(group.duplicate()));
}

}  // namespace chorale_torch
