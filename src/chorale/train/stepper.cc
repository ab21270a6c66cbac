#include "chorale/train/stepper.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <sstream>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/codegen/fused.h"
#include "chorale/device/allocator.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/comm_hooks.h"
#include "chorale/train/finite_watch.h"

namespace chorale::train {
namespace {

std::unique_ptr<optim::Optimizer> make_optimizer(const NamedTensors& parameters, const TrainOptions& o) {
  const double lr = o.lr, decay = o.weight_decay;
  if (o.optimizer == "adamw")
    return std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions{.lr = lr, .weight_decay = decay});
  if (o.optimizer == "adam")
    return std::make_unique<optim::Adam>(parameters, optim::AdamOptions{.lr = lr, .weight_decay = decay});
  if (o.optimizer == "sgd")
    return std::make_unique<optim::Sgd>(parameters,
                                        optim::SgdOptions{.lr = lr, .momentum = 0.9, .weight_decay = decay});
  if (o.optimizer == "rmsprop")
    return std::make_unique<optim::Rmsprop>(parameters, optim::RmspropOptions{.lr = lr, .weight_decay = decay});
  if (o.optimizer == "adagrad")
    return std::make_unique<optim::Adagrad>(parameters, optim::AdagradOptions{.lr = lr, .weight_decay = decay});
  CHORALE_INVARIANT(o.optimizer == "lamb", "no optimizer ", o.optimizer);
  return std::make_unique<optim::Lamb>(parameters, optim::LambOptions{.lr = lr, .weight_decay = decay});
}

optim::Scheduler make_scheduler(optim::Optimizer& optimizer, const TrainOptions& o, int64_t steps) {
  if (o.schedule == "one-cycle") {
    // One more than there are steps: the rate behind the last one is set too.
    const optim::OneCycleOptions cycle{.max_lr = o.lr, .steps = steps + 1};
    if (optimizer.has_option("momentum") || optimizer.has_option("beta1"))
      return optim::Scheduler::one_cycle(optimizer, cycle);
    return {optimizer, optim::one_cycle_lr(cycle)};
  }
  // The first step is not taken at a rate of 0.
  const int64_t warmup = std::min(o.warmup, steps);
  const optim::Schedule rise = optim::scaled_by([warmup](int64_t step) {
    return step < warmup ? static_cast<double>(step + 1) / static_cast<double>(warmup + 1) : 1.0;
  });
  if (o.schedule == "constant") return {optimizer, rise};
  if (o.schedule == "linear") {
    const optim::Schedule fall = optim::scaled_by([warmup, steps](int64_t step) {
      const int64_t falling = std::max<int64_t>(steps - warmup, 1),
                    done = std::clamp<int64_t>(step - warmup, 0, falling);
      return 1 - static_cast<double>(done) / static_cast<double>(falling);
    });
    return {optimizer, optim::chained({rise, fall})};
  }
  CHORALE_INVARIANT(o.schedule == "cosine", "no schedule ", o.schedule);
  return {optimizer, optim::chained({rise, [warmup, steps](int64_t step, double base) {
                                       if (step < warmup) return base;
                                       return optim::cosine({.steps = std::max<int64_t>(steps - warmup, 1),
                                                             .min_lr = base / 10})(step - warmup, base);
                                     }})};
}

std::shared_ptr<parallel::PowerSgd> make_power_sgd(const TrainOptions& o, int64_t steps) {
  if (o.compress != "powersgd") return nullptr;
  // The first tenth of a run, while gradients are large, is not compressed.
  return std::make_shared<parallel::PowerSgd>(parallel::PowerSgdOptions{
      .rank = 4, .start_iteration = std::clamp<int64_t>(steps / 10, 2, 1000), .seed = static_cast<uint64_t>(o.seed)});
}

// The task's forward from graphs. Host code runs in every step: a task may look at values, which costs a break.
// `graphs` then says what was compiled.
Objective::Forward make_forward(Task& task, const TrainOptions& o, std::function<std::string()>& graphs) {
  if (!o.compile) return {};
  auto forward = chorale::compile(
      [&task](const Tensor& x, const Tensor& y) {
        const Outcome outcome = task.forward({x, y});
        return std::pair(outcome.loss, outcome.right);
      },
      {.backend = codegen::fused(), .name = "train"});
  graphs = [forward] { return explain(forward).text(); };
  return [forward](const Tensor& x, const Tensor& y) -> Outcome {
    const auto result = forward(x, y);
    return {result.first, result.second};
  };
}

std::unique_ptr<FullSharding> make_sharding(nn::Module& model, const JobRanks& ranks, const TrainOptions& o,
                                            Device device, const ShardFully& shard_fully) {
  if (!ranks.shards()) return nullptr;
  CHORALE_CHECK(shard_fully, "[train] this program cannot shard models: give every rank --fsdp on its command line");
  // Made without memory: a rank has its parts, and never the whole model.
  auto sharding = shard_fully(model, ranks, o, device);
  model.materialize(o.offload ? kCpu : device);
  return sharding;
}

int64_t tensor_bytes(const Tensor& x) { return x.elems() * static_cast<int64_t>(x.elem_bytes()); }

// Its errors say where ranks stand in the mesh, where there is one.
std::unique_ptr<parallel::DistributedDataParallel<Objective>> make_ddp(Objective objective, const JobRanks& ranks) {
  using Ddp = parallel::DistributedDataParallel<Objective>;
  if (ranks.is_split())
    return std::make_unique<Ddp>(std::move(objective), parallel::DdpOptions{.mesh = ranks.mesh()["dp"]});
  return std::make_unique<Ddp>(std::move(objective), ranks.replicas());
}

constexpr const char *kOptimizer = "optimizer/", *kSchedule = "schedule/", *kScale = "scale/";
// What only one rank has. Where ranks have parts of a model it is of no use with another number of parts.
std::string own_prefix(int rank, int parts) {
  return parts == 1 ? concat("rank-", rank, "/") : concat("rank-", rank, "-tp-", parts, "/");
}

}  // namespace

Stepper::Stepper(Task& task, const TrainOptions& options, int64_t steps, const JobRanks& ranks,
                 const ShardFully& shard_fully)
    : options_(options),
      task_(task),
      ranks_(ranks),
      split_(task.model(), options, ranks),
      sharding_(make_sharding(task.model(), ranks, options, task.device(), shard_fully)),
      ddp_(sharding_ ? nullptr : make_ddp(Objective(task, split_, make_forward(task, options, graphs_)), ranks)),
      objective_(task, split_, sharding_ ? make_forward(task, options, graphs_) : Objective::Forward()),
      optimizer_(make_optimizer(task.model().named_parameters(), options)),
      scheduler_(make_scheduler(*optimizer_, options, steps)),
      scaler_({.enabled = options.precision == "f16",
               .parts = ranks.is_split() && !ranks.shards() ? ranks.mesh().shared_group(1) : nullptr}),
      power_sgd_(make_power_sgd(options, steps)) {
  if (options.compress == "bf16" && ddp_) ddp_->register_comm_hook(parallel::bf16_compress_hook());
  if (power_sgd_) ddp_->register_comm_hook(parallel::power_sgd_hook(power_sgd_));
}

void Stepper::start(const NamedTensors& weights) {
  if (!sharding_) return;
  if (options_.init.empty()) {
    task_.draw_model();
  } else {
    sharding_->fill(weights);
  }
}

Outcome Stepper::forward(const data::Example& batch) {
  std::optional<Autocast> scope;
  if (options_.precision != "f32") scope.emplace(options_.precision == "bf16" ? DType::kBF16 : DType::kF16);
  return ddp_ ? (*ddp_)(batch.x, batch.y) : objective_(batch.x, batch.y);
}

StepResult Stepper::compute(const Pieces& pieces, const std::function<data::Example()>& next) {
  StepResult result;
  random_before_ = default_generator().state();
  examples_.clear();
  optimizer_->zero_grad();
  const double waited_before = sharding_ ? sharding_->seconds_waited() : 0;
  for (int64_t piece = 1; piece <= pieces.count; ++piece) {
    std::optional<parallel::DataParallelBase::NoSync> alone;
    if (ddp_ && piece < pieces.count) alone.emplace(*ddp_);
    if (sharding_) sharding_->set_sync(piece == pieces.count);
    examples_.push_back(task_.here(next()));
    const double divisor = pieces.examples / static_cast<double>(examples_.back().x.size(0));
    const Outcome outcome = forward(examples_.back());
    backward(scaler_.scale(divisor != 1 ? outcome.loss / divisor : outcome.loss));
    result.loss += outcome.loss.item<float>() / divisor;
    if (outcome.right.defined()) result.right += outcome.right.item<int64_t>();
  }
  if (sharding_) waited_s_ = sharding_->seconds_waited() - waited_before;
  return result;
}

CommunicationTimes Stepper::communication() const {
  if (sharding_) return {waited_s_ * 1e3, 0};
  const parallel::DdpLog times = ddp_->log();
  return {static_cast<double>(times.backward_comm_time) / 1e6,
          static_cast<double>(times.backward_compute_comm_overlap_time) / 1e6};
}

void Stepper::sync_buffers() {
  const NamedTensors buffers = task_.model().named_buffers();
  if (buffers.empty()) return;
  if (ddp_) return ddp_->sync_module_states(ranks_.replicas().global_rank(0));
  for (const auto& [name, buffer] : buffers) ranks_.all().broadcast(buffer, 0).wait();
}

// An optimizer makes its states in its first step: one of a single number tells how many there will be of each.
int64_t Stepper::state_bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, x] : optimizer_->state_dict()) bytes += tensor_bytes(x.is_sharded() ? to_local(x) : x);
  if (bytes > sharding_->sizes().parts / 2) return bytes;
  const Tensor number = ones({1});
  set_requires_grad(number, true);
  const auto probe = make_optimizer({{"x", number}}, options_);
  set_gradient(number, ones({1}));
  probe->step();
  int64_t states = 0;
  for (const auto& [name, x] : probe->state_dict()) states += name.starts_with("state/x/") && x.dims() == 1 ? 1 : 0;
  return states * sharding_->sizes().parts;
}

bool Stepper::parts_are_elsewhere() const { return sharding_ && options_.offload && task_.device() != kCpu; }

StepMemory Stepper::rehearse(const data::Example& piece) {
  StepMemory memory;
  Allocator& allocator = allocator_of(task_.device());
  allocator.reset_peak();
  const auto current = [&] { return static_cast<int64_t>(allocator.stats().current_bytes); };
  const int64_t before = current();
  {
    const Outcome outcome = forward(task_.here(piece));
    memory.model = sharding_->sizes();
    memory.activations = current() - before - memory.model.gathered;
    sharding_->set_sync(true);
    backward(scaler_.scale(outcome.loss));
  }
  optimizer_->zero_grad();
  memory.states = state_bytes();
  int64_t there = 0;
  for (const auto& [name, x] : optimizer_->state_dict()) there += tensor_bytes(x.is_sharded() ? to_local(x) : x);
  memory.peak = static_cast<int64_t>(allocator.stats().peak_bytes);
  if (!parts_are_elsewhere()) memory.peak += std::max<int64_t>(memory.states - there, 0);
  allocator.reset_peak();
  return memory;
}

// The largest of them tells it, where a norm could overflow.
bool Stepper::gradients_are_finite() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  return std::isfinite(optim::clip_grad_norm(split_.parameters(), kInfinity, {.norm_type = kInfinity}));
}

UpdateResult Stepper::prepare() {
  UpdateResult result;
  if (options_.clip > 0 || ranks_.has_parts()) scaler_.unscale(*optimizer_);
  if (options_.clip > 0) result.gradient_norm = optim::clip_grad_norm(split_.parameters(), options_.clip);
  // With loss scaling a step is skipped now and then, which is how the scale is found.
  const bool is_suspect = options_.clip == 0 || !std::isfinite(result.gradient_norm);
  if (stops_at_nan() && !scaler_.enabled() && is_suspect && !gradients_are_finite())
    result.problem = "a gradient is not finite";
  return result;
}

void Stepper::update(UpdateResult& result, double lr_scale) {
  if (!result.problem.empty()) return;
  if (lr_scale != 1) {
    for (size_t g = 0; g < optimizer_->group_count(); ++g) optimizer_->set_lr(g, optimizer_->lr(g) * lr_scale);
  }
  scaler_.step(*optimizer_);
  scaler_.update();
  scheduler_.step();  // sets the rate anew
  if (stops_at_nan() && scaler_.scale() < 1)
    result.problem = concat("gradients are not finite even with a loss scale of ", scaler_.scale());
}

std::string Stepper::find_not_finite() {
  default_generator().restore(random_before_);
  optimizer_->zero_grad();
  std::optional<parallel::DataParallelBase::NoSync> alone;
  if (ddp_) alone.emplace(*ddp_);
  FiniteWatch watch(task_.model());
  for (const data::Example& example : examples_) {
    if (!is_finite(example.x) || !is_finite(example.y)) watch.note("the examples themselves");
    const Outcome outcome = forward(example);
    if (!is_finite(outcome.loss)) watch.note("the loss itself");
    backward(scaler_.scale(outcome.loss));
    // It looks from the last layer to the first, as backward goes.
    const NamedTensors parameters = task_.model().named_parameters();
    for (auto row = parameters.rbegin(); row != parameters.rend(); ++row) {
      if (!is_finite(gradient(row->second))) watch.note(concat("the gradient of parameter ", row->first));
    }
  }
  optimizer_->zero_grad();
  return watch.first();
}

snapshot::State Stepper::state() const {
  // Buffers, such as running means, are each replica's own: the first one's are saved.
  snapshot::State all = snapshot::state_of(split_.placed_model(ranks_.replicas().rank() == 0));
  for (const auto& [name, tensor] : optimizer_->state_dict())
    snapshot::add_chunks(all, kOptimizer + name, split_.placed_state(name, tensor));
  const auto add = [&](const std::string& prefix, const NamedTensors& tensors) {
    for (const auto& [name, tensor] : tensors) snapshot::add_chunks(all, prefix + name, tensor);
  };
  add(kSchedule, scheduler_.state_dict());
  add(kScale, scaler_.state_dict());
  if (power_sgd_) add(own_prefix(ranks_.all().rank(), ranks_.parts()), power_sgd_->state_dict());
  return all;
}

void Stepper::load(const std::filesystem::path& folder) {
  const snapshot::Index index = snapshot::index_of(ranks_.all(), folder);
  snapshot::State state = snapshot::state_of(split_.placed_model(true));
  // Memory for what is behind a prefix.
  const auto rooms = [&](const std::string& prefix, const auto& is_wanted) {
    NamedTensors found;
    for (auto at = index.tensors.lower_bound(prefix); at != index.tensors.end(); ++at) {
      const auto& [key, saved] = *at;
      if (!key.starts_with(prefix)) break;
      if (!is_wanted(key)) continue;
      const std::string name = key.substr(prefix.size());
      const SplitModel::Room room = split_.room_for_state(name, saved.sizes, saved.dtype);
      snapshot::add_chunks(state, key, room.placed);
      found.emplace_back(name, room.own);
    }
    return found;
  };
  const auto all = [](const std::string&) { return true; };
  const NamedTensors optimizer = rooms(kOptimizer, all), schedule = rooms(kSchedule, all), scale = rooms(kScale, all);
  NamedTensors own;
  if (power_sgd_) {
    const int rank = ranks_.all().rank(), size = ranks_.all().size(), parts = ranks_.parts();
    const auto begins_with = [&](const std::string& prefix) {
      const auto at = index.tensors.lower_bound(prefix);
      return at != index.tensors.end() && at->first.starts_with(prefix) ? at : index.tensors.end();
    };
    const auto is_there = [&](int r) { return begins_with(own_prefix(r, parts)) != index.tensors.end(); };
    if (is_there(0)) {
      // Another number of replicas can use what they share; what one rank's factors missed is lost.
      const bool same_ranks = is_there(size - 1) && !is_there(size);
      own = rooms(own_prefix(same_ranks ? rank : rank % parts, parts),
                  [&](const std::string& key) { return same_ranks || !key.ends_with("/error"); });
    } else if (const auto first = begins_with("rank-0"); first != index.tensors.end()) {
      // Matrices were cut otherwise: only numbers, such as the count of steps, go on.
      own = rooms(first->first.substr(0, first->first.find('/') + 1),
                  [](const std::string& key) { return key.find("/matrix/") == std::string::npos; });
    }
  }
  snapshot::load(ranks_.all(), folder, state,
                 {.verify = snapshot::Verify::kNot});  // the first rank has looked at all of it
  optimizer_->load_state_dict(optimizer);
  scheduler_.load_state_dict(schedule);
  scaler_.load_state_dict(scale);
  if (power_sgd_) power_sgd_->load_state_dict(own);
}

// Name and value on a line each: all of them are single numbers.
std::string Stepper::numbers() const {
  std::string text;
  for (const auto& [prefix, state] :
       {std::pair(kSchedule, scheduler_.state_dict()), std::pair(kScale, scaler_.state_dict())}) {
    for (const auto& [name, x] : state)
      text +=
          concat(prefix, name, " ", static_cast<int>(x.dtype()), " ", std::bit_cast<uint64_t>(x.item<double>()), "\n");
  }
  return text;
}

void Stepper::load_numbers(const std::string& text) {
  NamedTensors schedule, scale;
  std::istringstream lines(text);
  std::string name;
  int dtype = 0;
  uint64_t bits = 0;
  while (lines >> name >> dtype >> bits) {
    const bool is_schedule = name.starts_with(kSchedule);
    (is_schedule ? schedule : scale)
        .emplace_back(name.substr(std::string_view(is_schedule ? kSchedule : kScale).size()),
                      Tensor::scalar(std::bit_cast<double>(bits), static_cast<DType>(dtype)));
  }
  scheduler_.load_state_dict(schedule);
  scaler_.load_state_dict(scale);
}

}  // namespace chorale::train
