#include "chorale/api/api.h"
#include "chorale/comm/mesh_places.h"
#include "chorale/op/collective.h"
#include "chorale/parallel/tensor_parallel.h"

namespace chorale::parallel {
namespace {

// With p the probabilities and t the target's class: loss = -w_t log p_t. The gradient by the logit of class c is
// (p_c - [c = t]) w_t, which a rank knows of its classes without asking.
class LossParallel final : public Function {
 public:
  LossParallel(Tensor target, LossParallelOptions options) : target_(std::move(target)), options_(std::move(options)) {}
  const char* name() const override { return "loss_parallel"; }

  std::vector<Tensor> forward(const std::vector<Tensor>& in) override {
    layout_ = sharding::sharded(in[0]).layout;
    sizes_ = in[0].sizes();
    return comm::with_places(layout_->mesh, [&] { return std::vector<Tensor>{loss_of(in)}; });
  }

  // There is one pass over a matrix as large as the logits; the target's classes are few numbers.
  std::vector<Tensor> backward(const std::vector<Tensor>& dout) override {
    const Tensor &powers = saved()[0], &scale = saved()[1], &at = saved()[2], &hit = saved()[3];
    const Tensor dy = full_tensor(dout[0]);
    const Tensor dx = mul(powers, unsqueeze(mul(scale, dy), 1));
    if (dx.size(1) > 0) scatter_add_(dx, 1, at, unsqueeze(neg(mul(hit, dy)), 1));
    return {
        from_local(dx, layout_->mesh, layout_->placements, {.sizes = sizes_, .strides = contiguous_strides(sizes_)})};
  }

 private:
  Tensor loss_of(const std::vector<Tensor>& in) {
    const Tensor group = group_tensor(layout_->mesh.shared_group(0)), x = to_local(in[0]);
    const int64_t first = sharding::own_part(sizes_, *layout_).first[1], classes = x.size(1);

    Shape per_sample = target_.sizes();
    const Tensor highest = all_reduce(
        classes > 0 ? amax(x, 1) : full(per_sample, -std::numeric_limits<double>::infinity(), x.dtype(), x.device()),
        group, Reduce::kMax);
    const Tensor powers = sub(x, unsqueeze(highest, 1));
    exp_(powers);
    const Tensor total = all_reduce(sum(powers, 1), group);

    const Tensor valid = ne(target_, options_.ignore_index), place = sub(target_, first);
    const Tensor mine = logical_and(valid, logical_and(ge(place, 0), lt(place, classes)));
    const Tensor at = unsqueeze(where(mine, place, zeros_like(place)), 1);
    Tensor picked = zeros(per_sample, x.dtype(), x.device());
    if (classes > 0) picked = where(mine, sub(squeeze(gather(x, 1, at), 1), highest), picked);
    const Tensor log_p = sub(all_reduce(picked, group), log(total));

    Tensor weight = to(valid, x.dtype());
    if (options_.weight.defined()) {
      const Tensor known = options_.weight.is_sharded() ? to_local(options_.weight) : options_.weight;
      const Tensor safe = where(valid, target_, zeros_like(target_));
      weight = mul(weight, reshape(index_select(known, 0, reshape(safe, {-1})), per_sample));
    }
    Tensor loss = neg(mul(log_p, weight));
    // Samples that do not count have no loss, whatever their logits are.
    loss = where(valid, loss, zeros_like(loss));
    if (options_.reduction != Reduction::kNone) loss = sum(loss);
    if (options_.reduction == Reduction::kMean) {
      const Tensor divisor = sum(weight);
      loss = div(loss, divisor);
      weight = div(weight, divisor);
    }
    save_for_backward({powers, div(weight, total), at, mul(weight, to(mine, x.dtype()))});
    return from_local(loss, layout_->mesh, {replicate()});
  }

  Tensor target_;
  LossParallelOptions options_;
  std::shared_ptr<const sharding::Layout> layout_;
  Shape sizes_;
};

}  // namespace

Tensor loss_parallel(const Tensor& logits, const Tensor& target, const LossParallelOptions& options) {
  const Mesh& mesh = mesh_of(logits);
  CHORALE_CHECK(mesh.dims() == 1 && logits.dims() >= 2 && placements_of(logits)[0] == shard(1),
                "[loss_parallel] takes logits that a mesh of one dimension splits along the classes, [S(1)], found ",
                placements_of(logits), " over a ", mesh, " for shape ", logits.sizes());
  Tensor classes = target;
  if (target.is_sharded()) classes = full_tensor(target);
  Shape expected = logits.sizes();
  expected.erase(1);
  CHORALE_CHECK(classes.dtype() == DType::kI64 && classes.sizes() == expected,
                "[loss_parallel] the target holds classes, i64 of shape ", expected, ", found ", classes.dtype(), " ",
                classes.sizes());
  return apply<LossParallel>({logits}, classes, options)[0];
}

}  // namespace chorale::parallel
