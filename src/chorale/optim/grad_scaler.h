// Loss scaling for training in f16: small gradients would round to zero, so the loss is multiplied by a large scale and
// the gradients divided by it again before the step.
//
//   backward(scaler.scale(loss));
//   scaler.unscale(optimizer);  // only where something looks at the gradients before the step, such as clipping
//   clip_grad_norm(optimizer.parameters(), 1);
//   scaler.step(optimizer);
//   scaler.update();
#pragma once

#include <memory>
#include <unordered_map>

#include "chorale/comm/group.h"
#include "chorale/graph/host_value.h"
#include "chorale/optim/optimizer.h"

namespace chorale::optim {

struct GradScalerOptions {
  double scale = 65536;  // in f32
  double growth = 2;     // after `interval` steps in a row with finite gradients
  double backoff = 0.5;  // after a step with others
  int64_t interval = 2000;
  bool enabled = true;  // false: scale() and unscale() do nothing and step() always steps
  // Ranks that hold parts of one model as tensors of their own: a gradient that is not finite on one of them counts on
  // all. Gradients that are sharded tensors need no such group.
  std::shared_ptr<const comm::Group> parts{};
};

// Whether a step was taken. The host waits for the answer only where it is used: a step that is compiled or replayed
// never does.
class StepTaken {
 public:
  StepTaken() = default;
  explicit StepTaken(Tensor found_inf) : found_inf_(std::move(found_inf)) {}
  operator bool() const {  // NOLINT(google-explicit-constructor)
    return !found_inf_.defined() || found_inf_.item<float>() == 0;
  }

 private:
  Tensor found_inf_;
};

// An optimizer whose gradients are dealt to the ranks of a group (zero::ZeroOptimizer): one that is not finite on a
// rank counts on all, and all make the same calls.
class SharedOptimizer {
 public:
  virtual ~SharedOptimizer() = default;
  virtual std::vector<Tensor> parameters() const = 0;  // this rank need not have a gradient of any
  virtual const comm::Group& sharing_group() const = 0;
  virtual bool updates_in_backward() const = 0;
  virtual void step() = 0;
};

class GradScaler {
 public:
  explicit GradScaler(const GradScalerOptions& options = {});
  // A copy goes its own way.
  GradScaler(const GradScaler& other);
  GradScaler& operator=(const GradScaler& other);

  Tensor scale(const Tensor& loss) const;
  // Divides the gradients of the optimizer's parameters by the scale, in one pass that also finds out whether all are
  // finite. At most once between two updates.
  void unscale(Optimizer& optimizer);
  void unscale(SharedOptimizer& optimizer);
  // Unscales, unless that was done, and steps if every gradient was finite; says whether it did.
  StepTaken step(Optimizer& optimizer);
  StepTaken step(SharedOptimizer& optimizer);
  // Called after the steps of all optimizers: adapts the scale.
  void update();

  double scale() const { return options_.enabled ? scale_.item<double>() : 1; }
  bool enabled() const { return options_.enabled; }

  NamedTensors state_dict() const;
  void load_state_dict(const NamedTensors& state);

 private:
  struct Progress {
    Tensor found_inf;  // f32: not 0 where a gradient was infinite or NaN
    bool stepped = false;
  };
  // What unscaling found, once for each optimizer.
  const Tensor& begin_step(const void* optimizer);
  void unscale(const void* optimizer, bool updates_in_backward, const std::vector<Tensor>& parameters,
               const comm::Group* sharing);
  // The numbers below are where the loss is.
  void follow(Device device) const;

  GradScalerOptions options_;  // its scale is the one at the start
  // Changes when they do: a whole graph has them in its nodes.
  graph::HostValue options_seen_{0};
  mutable Tensor scale_;                                // f32, as the ops read it
  mutable Tensor finite_steps_;                         // i64: in a row
  std::unordered_map<const void*, Progress> progress_;  // by optimizer, since the last update()
};

}  // namespace chorale::optim
