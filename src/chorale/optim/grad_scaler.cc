#include "chorale/optim/grad_scaler.h"

#include <algorithm>

#include "chorale/comm/mesh_places.h"
#include "chorale/op/collective.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/optim/gradients.h"
#include "chorale/optim/state_reader.h"
#include "chorale/sharding/sharded.h"

namespace chorale::optim {

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options),
      scale_(Tensor::scalar(options.scale, DType::kF32)),
      finite_steps_(Tensor::scalar(0, DType::kI64)) {
  CHORALE_CHECK(options.scale > 0 && options.growth > 1 && options.backoff > 0 && options.backoff < 1,
                "[GradScaler] expected scale > 0, growth > 1 and 0 < backoff < 1, found ", options.scale, ", ",
                options.growth, " and ", options.backoff);
  CHORALE_CHECK(options.interval > 0, "[GradScaler] interval must be positive, not ", options.interval);
}

GradScaler::GradScaler(const GradScaler& other)
    : options_(other.options_),
      scale_(clone(other.scale_)),
      finite_steps_(clone(other.finite_steps_)),
      progress_(other.progress_) {}

GradScaler& GradScaler::operator=(const GradScaler& other) {
  options_ = other.options_;
  scale_ = clone(other.scale_);
  finite_steps_ = clone(other.finite_steps_);
  progress_ = other.progress_;
  return *this;
}

void GradScaler::follow(Device device) const {
  if (scale_.device() == device) return;
  scale_ = to(scale_, device);
  finite_steps_ = to(finite_steps_, device);
}

Tensor GradScaler::scale(const Tensor& loss) const {
  if (!options_.enabled) return loss;
  op::need_defined("GradScaler::scale", "loss", loss);
  follow(loss.device());
  return mul(loss, scale_);
}

void GradScaler::unscale(Optimizer& optimizer) {
  unscale(&optimizer, optimizer.updates_in_backward(), optimizer.parameters(), nullptr);
}
void GradScaler::unscale(SharedOptimizer& optimizer) {
  unscale(&optimizer, optimizer.updates_in_backward(), optimizer.parameters(), &optimizer.sharing_group());
}

void GradScaler::unscale(const void* optimizer, bool updates_in_backward, const std::vector<Tensor>& parameters,
                         const comm::Group* sharing) {
  if (!options_.enabled) return;
  CHORALE_CHECK_STATE(!updates_in_backward,
                      "[GradScaler] this optimizer updates in backward, with gradients that are still scaled");
  CHORALE_CHECK_STATE(
      !progress_.contains(optimizer),
      "[GradScaler] the gradients of this optimizer were unscaled before; call update() after its step");
  const NoGrad quiet;
  // Where ranks share an optimizer, this one may have no gradient; the others wait for its answer all the same.
  const bool has_some =
      std::any_of(parameters.begin(), parameters.end(), [](const Tensor& x) { return chorale::gradient(x).defined(); });
  const GradientList gradients = sharing && !has_some ? GradientList() : gradients_of("GradScaler", parameters);
  for (size_t i = 0; i < gradients.tensors.size(); ++i) {
    CHORALE_CHECK(gradients.tensors[i].dtype() != DType::kF16, "[GradScaler] parameter ", gradients.parameters[i],
                  " has gradients of f16, in which the unscaled ones would vanish; keep parameters in f32 and compute "
                  "under Autocast");
  }
  // Parts of sharded gradients are unscaled where they are; one that is not finite counts on all ranks of the mesh.
  std::vector<Tensor> parts = gradients.tensors;
  std::vector<Mesh> meshes;
  for (Tensor& part : parts) {
    if (!part.is_sharded()) continue;
    if (std::find(meshes.begin(), meshes.end(), mesh_of(part)) == meshes.end()) meshes.push_back(mesh_of(part));
    part = sharding::local_of(part);
  }
  if (!parts.empty()) follow(parts[0].device());
  const Tensor found_inf = zeros({}, DType::kF32, scale_.device());
  if (!parts.empty()) unscale_(parts, scale_, found_inf);
  for (const Mesh& mesh : meshes) {
    comm::with_places(mesh, [&] {
      for (size_t m = 0; m < mesh.dims(); ++m) all_reduce_(found_inf, group_tensor(mesh.shared_group(m)), Reduce::kMax);
    });
  }
  if (sharing) all_reduce_(found_inf, group_tensor(*sharing), Reduce::kMax);
  if (options_.parts) all_reduce_(found_inf, group_tensor(options_.parts), Reduce::kMax);
  progress_[optimizer] = {.found_inf = found_inf};
}

const Tensor& GradScaler::begin_step(const void* optimizer) {
  Progress& progress = progress_[optimizer];
  CHORALE_CHECK_STATE(!progress.stepped,
                      "[GradScaler] step() was called twice for one optimizer; call update() between");
  progress.stepped = true;
  return progress.found_inf;
}

StepTaken GradScaler::step(Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return {};
  }
  if (!progress_.contains(&optimizer)) unscale(optimizer);
  const Tensor& found_inf = begin_step(&optimizer);
  optimizer.step_unless(found_inf);
  return StepTaken(found_inf);
}

// Its ranks send each other what a step makes, so that the host must know now.
StepTaken GradScaler::step(SharedOptimizer& optimizer) {
  if (!progress_.contains(&optimizer)) unscale(optimizer);
  const StepTaken taken = options_.enabled ? StepTaken(begin_step(&optimizer)) : StepTaken();
  if (taken) optimizer.step();
  return taken;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  CHORALE_CHECK_STATE(!progress_.empty(), "[GradScaler] update() without a step() or an unscale() before it");
  const NoGrad quiet;
  options_seen_.read("how the loss scale is adapted");
  Tensor found_inf;
  for (const auto& [optimizer, progress] : progress_)
    found_inf = found_inf.defined() ? maximum(found_inf, progress.found_inf) : progress.found_inf;
  progress_.clear();
  next_loss_scale_(scale_, finite_steps_, found_inf,
                   {.growth = options_.growth, .backoff = options_.backoff, .interval = options_.interval});
}

NamedTensors GradScaler::state_dict() const {
  return {{"scale", to(scale_, DType::kF64)},
          {"growth", Tensor::scalar(options_.growth, DType::kF64)},
          {"backoff", Tensor::scalar(options_.backoff, DType::kF64)},
          {"interval", Tensor::scalar(options_.interval, DType::kI64)},
          {"finite_steps", clone(finite_steps_)}};
}

void GradScaler::load_state_dict(const NamedTensors& state) {
  StateReader reader("GradScaler", state);
  const GradScalerOptions options{.scale = reader.number("scale"),
                                  .growth = reader.number("growth"),
                                  .backoff = reader.number("backoff"),
                                  .interval = reader.whole_number("interval"),
                                  .enabled = options_.enabled,
                                  .parts = options_.parts};
  const int64_t finite_steps = reader.whole_number("finite_steps");
  reader.finish();
  const GradScaler checked(options);
  const bool differs =
      options.growth != options_.growth || options.backoff != options_.backoff || options.interval != options_.interval;
  if (differs) options_seen_.set(options_seen_.value() + 1);
  options_ = checked.options_;
  const NoGrad quiet;
  fill_(scale_, options.scale);
  fill_(finite_steps_, finite_steps);
}

}  // namespace chorale::optim
