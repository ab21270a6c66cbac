#include "chorale/nn/norm.h"

#include "chorale/api/api.h"
#include "chorale/op/need_defined.h"

namespace chorale::nn {

// A norm without weights is a choice, so one that was moved from would go on quietly, also where forward is called by
// its name (a call of the module asks need_whole() itself).

namespace {

void check_image(const Module& module, const Tensor& x, int64_t dims, int64_t channels, bool channel_first) {
  op::need_defined(module.type_name(), "x", x);
  // One-dimensional batch norm takes [N, C] too; instance norm takes an image without batch.
  const int64_t channel_dim = channel_first && x.dims() == dims + 1 ? 0 : 1;
  const bool fits = x.dims() == dims + 2 || (x.dims() == dims + 1 && (channel_first || dims == 1));
  CHORALE_CHECK(fits && x.size(channel_dim) == channels, "[", module.type_name(), "] expected ", channels,
                " channels in [N, C",
                dims == 1   ? ", L"
                : dims == 2 ? ", H, W"
                            : ", D, H, W",
                "], found shape ", x.sizes());
}

void check_may_change(const Module& module, bool would_change) {
  CHORALE_CHECK_STATE(!would_change, "[", module.type_name(),
                      "] is in training and would change its running statistics, but it is called through a const "
                      "module; call eval() first, or call a module that is not const");
}

// The parameters and running statistics that the options ask for.
template <class Norm, class Options>
void make_members(const char* name, Norm& norm, int64_t channels, const Options& options) {
  CHORALE_CHECK(channels > 0, "[", name, "] expected a positive number of channels, found ", channels);
  if (options.affine) {
    norm.weight = Parameter(ones({channels}));
    norm.bias = Parameter(zeros({channels}));
  }
  if (options.track_running_stats) {
    norm.running_mean = Buffer(zeros({channels}));
    norm.running_var = Buffer(ones({channels}));
    norm.num_batches_tracked = Buffer(zeros({}, DType::kI64));
  }
}

}  // namespace

BatchNorm::BatchNorm(int64_t dims, int64_t channels, const BatchNormOptions& options)
    : dims_(dims), channels_(channels), options_(options) {
  make_members("BatchNorm", *this, channels, options);
}

Tensor BatchNorm::forward(const Tensor& x) {
  check_image(*this, x, dims_, channels_, false);
  double momentum = options_.momentum.value_or(0);
  if (is_training() && running_mean.defined()) {
    add_(num_batches_tracked, 1);
    if (!options_.momentum) momentum = 1 / num_batches_tracked.item<double>();
  }
  return normalize(x, momentum);
}

Tensor BatchNorm::forward(const Tensor& x) const {
  check_image(*this, x, dims_, channels_, false);
  check_may_change(*this, is_training() && running_mean.defined());
  return normalize(x, 0);
}

Tensor BatchNorm::normalize(const Tensor& x, double momentum) const {
  need_whole();
  if (is_training() && statistics_)
    return statistics_->batch_norm(x, running_mean, running_var, weight, bias, momentum, options_.eps);
  return batch_norm(x, running_mean, running_var, weight, bias, is_training() || !running_mean.defined(), momentum,
                    options_.eps);
}

std::string BatchNorm::describe() const {
  return concat(
      channels_, ", eps=", options_.eps, ", momentum=", options_.momentum ? to_text(*options_.momentum) : "none",
      options_.affine ? "" : ", affine=false", options_.track_running_stats ? "" : ", track_running_stats=false",
      statistics_ ? ", statistics of " + statistics_->describe() : "");
}

InstanceNorm::InstanceNorm(int64_t dims, int64_t channels, const InstanceNormOptions& options)
    : dims_(dims), channels_(channels), options_(options) {
  make_members("InstanceNorm", *this, channels, options);
}

Tensor InstanceNorm::forward(const Tensor& x) { return normalize(x); }

Tensor InstanceNorm::forward(const Tensor& x) const {
  check_may_change(*this, is_training() && running_mean.defined());
  return normalize(x);
}

Tensor InstanceNorm::normalize(const Tensor& x) const {
  need_whole();
  check_image(*this, x, dims_, channels_, true);
  const bool single = x.dims() == dims_ + 1;
  const Tensor y = instance_norm(single ? unsqueeze(x, 0) : x, running_mean, running_var, weight, bias,
                                 is_training() || !running_mean.defined(), options_.momentum, options_.eps);
  return single ? select(y, 0, 0) : y;
}

std::string InstanceNorm::describe() const {
  return concat(channels_, ", eps=", options_.eps, options_.affine ? ", affine=true" : "",
                options_.track_running_stats ? ", track_running_stats=true" : "");
}

LayerNorm::LayerNorm(const IntList& normalized_shape, const LayerNormOptions& options)
    : shape_(normalized_shape), eps_(options.eps) {
  CHORALE_CHECK(!shape_.empty(), "[LayerNorm] expected at least one dimension to normalise over");
  if (options.affine) weight = Parameter(ones(shape_.shape()));
  if (options.affine && options.bias) bias = Parameter(zeros(shape_.shape()));
}
Tensor LayerNorm::forward(const Tensor& x) const {
  need_whole();
  return layer_norm(x, shape_, weight, bias, eps_);
}
std::string LayerNorm::describe() const {
  return concat(shape_.shape(), ", eps=", eps_, weight.defined() ? "" : ", affine=false");
}

RMSNorm::RMSNorm(const IntList& normalized_shape, const RmsNormOptions& options)
    : shape_(normalized_shape), eps_(options.eps) {
  CHORALE_CHECK(!shape_.empty(), "[RMSNorm] expected at least one dimension to normalise over");
  if (options.affine) weight = Parameter(ones(shape_.shape()));
}
Tensor RMSNorm::forward(const Tensor& x) const {
  need_whole();
  return rms_norm(x, shape_, weight, eps_);
}
std::string RMSNorm::describe() const { return concat(shape_.shape(), weight.defined() ? "" : ", affine=false"); }

GroupNorm::GroupNorm(int64_t groups, int64_t channels, const GroupNormOptions& options)
    : groups_(groups), channels_(channels), eps_(options.eps) {
  CHORALE_CHECK(groups > 0 && channels > 0 && channels % groups == 0, "[GroupNorm] ", channels,
                " channels cannot be cut into ", groups, " equal groups");
  if (!options.affine) return;
  weight = Parameter(ones({channels}));
  bias = Parameter(zeros({channels}));
}
Tensor GroupNorm::forward(const Tensor& x) const {
  need_whole();
  op::need_defined("GroupNorm", "x", x);
  CHORALE_CHECK(x.dims() >= 2 && x.size(1) == channels_, "[GroupNorm] expected ", channels_,
                " channels in dimension 1, found shape ", x.sizes());
  return group_norm(x, groups_, weight, bias, eps_);
}
std::string GroupNorm::describe() const {
  return concat(groups_, ", ", channels_, ", eps=", eps_, weight.defined() ? "" : ", affine=false");
}

}  // namespace chorale::nn
