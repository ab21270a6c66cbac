#include "chorale/optim/grad_scaler.h"

#include <atomic>
#include <cmath>

#include "chorale/op/pointwise.h"
#include "chorale/optim/gradients.h"
#include "chorale/optim/state_reader.h"

namespace chorale::optim {

GradScaler::GradScaler(const GradScalerOptions& options) : options_(options) {
  CHORALE_CHECK(options.scale > 0 && options.growth > 1 && options.backoff > 0 && options.backoff < 1,
                "[GradScaler] expected scale > 0, growth > 1 and 0 < backoff < 1, found ", options.scale, ", ",
                options.growth, " and ", options.backoff);
  CHORALE_CHECK(options.interval > 0, "[GradScaler] interval must be positive, not ", options.interval);
}

Tensor GradScaler::scale(const Tensor& loss) const { return options_.enabled ? mul(loss, options_.scale) : loss; }

void GradScaler::unscale(Optimizer& optimizer) {
  if (!options_.enabled) return;
  CHORALE_CHECK_STATE(!optimizer.updates_in_backward(),
                      "[GradScaler] this optimizer updates in backward, with gradients that are still scaled");
  CHORALE_CHECK_STATE(
      !progress_.contains(&optimizer),
      "[GradScaler] the gradients of this optimizer were unscaled before; call update() after its step");
  const std::vector<Tensor> parameters = optimizer.parameters();
  const auto chunks = gradient_chunks("GradScaler", parameters);
  for (const GradientChunk& chunk : chunks) {
    CHORALE_CHECK(chunk.dtype != DType::kF16, "[GradScaler] parameter ", chunk.parameter,
                  " has gradients of f16, in which the unscaled ones would vanish; keep parameters in f32 and compute "
                  "under Autocast");
  }
  std::atomic<bool> finite = true;
  for_each_chunk(chunks, [&, factor = 1 / options_.scale](const GradientChunk& chunk, size_t) {
    if (!vec::scale_checked_loop(chunk.dtype)(chunk.data, chunk.n, factor))
      finite.store(false, std::memory_order_relaxed);
  });
  note_gradient_writes("GradScaler", parameters);
  progress_[&optimizer] = {.finite = finite};
}

bool GradScaler::step(Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  if (!progress_.contains(&optimizer)) unscale(optimizer);
  Progress& progress = progress_[&optimizer];
  CHORALE_CHECK_STATE(!progress.stepped,
                      "[GradScaler] step() was called twice for one optimizer; call update() between");
  progress.stepped = true;
  if (progress.finite) optimizer.step();
  return progress.finite;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  CHORALE_CHECK_STATE(!progress_.empty(), "[GradScaler] update() without a step() or an unscale() before it");
  bool finite = true;
  for (const auto& [optimizer, progress] : progress_) finite &= progress.finite;
  progress_.clear();
  if (!finite) {
    options_.scale *= options_.backoff;
    finite_steps_ = 0;
  } else if (++finite_steps_ == options_.interval) {
    // It may only grow as far as f32, in which it multiplies the loss, can hold it.
    const double grown = options_.scale * options_.growth;
    if (std::isfinite(static_cast<float>(grown))) options_.scale = grown;
    finite_steps_ = 0;
  }
}

NamedTensors GradScaler::state_dict() const {
  return {{"scale", Tensor::scalar(options_.scale, DType::kF64)},
          {"growth", Tensor::scalar(options_.growth, DType::kF64)},
          {"backoff", Tensor::scalar(options_.backoff, DType::kF64)},
          {"interval", Tensor::scalar(options_.interval, DType::kI64)},
          {"finite_steps", Tensor::scalar(finite_steps_, DType::kI64)}};
}

void GradScaler::load_state_dict(const NamedTensors& state) {
  StateReader reader("GradScaler", state);
  const GradScalerOptions options{.scale = reader.number("scale"),
                                  .growth = reader.number("growth"),
                                  .backoff = reader.number("backoff"),
                                  .interval = reader.whole_number("interval"),
                                  .enabled = options_.enabled};
  const int64_t finite_steps = reader.whole_number("finite_steps");
  reader.finish();
  options_ = GradScaler(options).options_;  // checked
  finite_steps_ = finite_steps;
}

}  // namespace chorale::optim
