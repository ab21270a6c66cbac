#include "chorale/parallel/sync_batch_norm.h"

#include "chorale/api/api.h"
#include "chorale/op/collective.h"

namespace chorale::parallel {
namespace {

// All dimensions but the channels.
IntList places(const Tensor& x) {
  IntList dims{0};
  for (int64_t d = 2; d < x.dims(); ++d) dims.values[dims.count++] = d;
  return dims;
}
int64_t count_per_channel(const Tensor& x) {
  int64_t count = 1;
  for (const int64_t d : places(x)) count *= x.size(d);
  return count;
}
// [C] as [C, 1, …], which broadcasts to x [N, C, …].
Tensor per_channel(const Tensor& values, const Tensor& x) {
  Shape sizes(static_cast<size_t>(x.dims()) - 1, 1);
  sizes[0] = values.elems();
  return reshape(values, sizes);
}

// For each of the channels [C], over the values of all ranks: how many values there are, their mean, and the sum of
// their squared distances from it. All are f64.
struct Moments {
  Tensor count, mean, squares;

  // Chan's formula, which loses no accuracy to a large mean. Without values on either side nothing changes.
  void add(const Moments& other) {
    const Tensor delta = other.mean - mean, total = count + other.count, divisor = clamp(total, 1);
    mean = mean + delta * other.count / divisor;
    squares = squares + (other.squares + delta * delta * count * other.count / divisor);
    count = total;
  }
};

// A rank without values takes part: the others wait for its row. Every rank adds up the same rows in the same order, so
// all get the same bits.
Moments moments_of_all_ranks(const Tensor& group, int64_t ranks, const Tensor& x) {
  const int64_t C = x.size(1), count = count_per_channel(x);
  const Tensor row = zeros({1, 1 + 2 * C}, DType::kF64, x.device());
  if (count > 0) {
    fill_(narrow(row, 1, 0, 1), count);
    copy_(narrow(row, 1, 1, C), mean(x, places(x)));
    copy_(narrow(row, 1, 1 + C, C), var(x, places(x), false, 0));
    mul_(narrow(row, 1, 1 + C, C), count);
  }
  const Tensor rows = all_gather(row, group);
  const auto of_rank = [&](int64_t r) {
    const Tensor own = select(rows, 0, r);
    return Moments{narrow(own, 0, 0, 1), narrow(own, 0, 1, C), narrow(own, 0, 1 + C, C)};
  };
  Moments all = of_rank(0);
  for (int64_t r = 1; r < ranks; ++r) all.add(of_rank(r));
  return all;
}

struct RunningAverage {
  Tensor mean, variance;
  double momentum;
};

// With z = (x - mean) * rstd:
//   y = z * weight + bias
//   dx = (dy - avg(dy) - z * avg(dy * z)) * rstd * weight, averages over all ranks
//   dweight = sum(dy * z), dbias = sum(dy), over this rank
class SyncBatchNorm final : public Function {
 public:
  SyncBatchNorm(std::shared_ptr<const comm::Group> group, RunningAverage running, double eps)
      : group_(std::move(group)), running_(std::move(running)), eps_(eps) {}
  const char* name() const override { return "sync_batch_norm"; }

  std::vector<Tensor> forward(const std::vector<Tensor>& in) override {
    const Tensor &x = in[0], &weight = in[1], &bias = in[2];
    const DType dtype = compute_of(x.dtype());
    const Tensor wide = to(x, dtype);
    const Moments moments = moments_of_all_ranks(group_tensor(group_), group_->size(), wide);
    count_ = moments.count.item<double>();
    CHORALE_CHECK(count_ != 1, "[SyncBatchNorm] one value per channel among all ", group_->size(),
                  " ranks has no variance: x is ", x.sizes(), " here; train with more samples");
    const Tensor mean = to(moments.mean, dtype);
    const Tensor variance = to(moments.squares / clamp(moments.count, 1), dtype);
    const Tensor rstd = rsqrt(variance + eps_);
    update_running(mean, variance);
    save_for_backward({x, weight, mean, rstd});

    Tensor y = wide - per_channel(mean, x);
    mul_(y, per_channel(weight.defined() ? rstd * weight : rstd, x));
    if (bias.defined()) {
      add_(y, per_channel(bias, x));
      bias_dtype_ = bias.dtype();
    }
    return {to(y, x.dtype())};
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override {
    CHORALE_CHECK_STATE(!grad_enabled(),
                        "[SyncBatchNorm] second derivatives would need those of other ranks; take them through an "
                        "ordinary batch norm (create_graph=false here)");
    const Tensor &x = saved()[0], &weight = saved()[1], &mean = saved()[2], &rstd = saved()[3];
    const Tensor dy = to(dout[0], mean.dtype());
    const Tensor z = mul(to(x, mean.dtype()) - per_channel(mean, x), per_channel(rstd, x));
    const Tensor sums = stack({sum(dy, places(x)), sum(dy * z, places(x))});
    std::vector<Tensor> result(3);
    if (needs(1)) result[1] = to(select(sums, 0, 1), weight.dtype());
    if (needs(2)) result[2] = to(select(sums, 0, 0), bias_dtype_);
    if (needs(0)) {
      const Tensor averages = all_reduce(sums, group_tensor(group_));
      if (count_ > 0) div_(averages, count_);
      // The result is written to z's memory, which has x's layout whatever dy's is.
      const Tensor& dx = mul_(z, per_channel(-select(averages, 0, 1), x));
      add_(dx, dy);
      sub_(dx, per_channel(select(averages, 0, 0), x));
      mul_(dx, per_channel(weight.defined() ? rstd * weight : rstd, x));
      result[0] = to(dx, x.dtype());
    }
    return result;
  }

 private:
  void update_running(const Tensor& mean, const Tensor& variance) const {
    if (!running_.mean.defined() || count_ == 0) return;
    lerp_(running_.mean, to(mean, running_.mean.dtype()), running_.momentum);
    lerp_(running_.variance, to(variance * (count_ / (count_ - 1)), running_.variance.dtype()), running_.momentum);
  }

  std::shared_ptr<const comm::Group> group_;
  RunningAverage running_;
  double eps_;
  DType bias_dtype_ = DType::kF32;
  double count_ = 0;  // values per channel, of all ranks
};

}  // namespace

Tensor SyncStatistics::batch_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var,
                                  const Tensor& weight, const Tensor& bias, double momentum, double eps) const {
  if (group_->size() < 2)
    return chorale::batch_norm(x, running_mean, running_var, weight, bias, /*training=*/true, momentum, eps);
  return apply<SyncBatchNorm>({x, weight, bias}, group_, RunningAverage{running_mean, running_var, momentum}, eps)[0];
}

std::string SyncStatistics::describe() const {
  return group_->is_member() ? concat(group_->size(), " ranks") : "this rank";
}

void convert_sync_batchnorm(nn::Module& module, const comm::Group& group) {
  const auto statistics = std::make_shared<const SyncStatistics>(group.duplicate());
  module.apply([&](nn::Module& part) {
    if (auto* norm = dynamic_cast<nn::BatchNorm*>(&part)) norm->set_statistics(statistics);
  });
}

std::vector<int> members_of(const comm::Group& group) {
  return group.is_member() ? group.members() : std::vector<int>{};
}

void move_sync_batchnorm(nn::Module& module, const std::vector<int>& before, const comm::Group& group) {
  std::vector<nn::BatchNorm*> layers;
  module.apply([&](nn::Module& part) {
    auto* norm = dynamic_cast<nn::BatchNorm*>(&part);
    const auto* own = norm ? dynamic_cast<const SyncStatistics*>(norm->statistics().get()) : nullptr;
    if (own && members_of(own->group()) == before) layers.push_back(norm);
  });
  if (layers.empty()) return;
  const auto statistics = std::make_shared<const SyncStatistics>(group.is_member() ? group.duplicate() : comm::Group());
  for (nn::BatchNorm* layer : layers) layer->set_statistics(statistics);
}

bool has_sync_batchnorm(nn::Module& module) {
  for (const auto& [name, part] : module.named_modules()) {
    const auto* norm = dynamic_cast<const nn::BatchNorm*>(part);
    if (norm && dynamic_cast<const SyncStatistics*>(norm->statistics().get())) return true;
  }
  return false;
}

}  // namespace chorale::parallel
