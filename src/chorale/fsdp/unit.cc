#include "chorale/fsdp/unit.h"

#include <algorithm>
#include <thread>
#include <tuple>
#include <utility>

#include "chorale/api/api.h"
#include "chorale/autograd/backward.h"
#include "chorale/autograd/new_node.h"
#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/comm/coalescing.h"
#include "chorale/graph/recording.h"

namespace chorale::fsdp {
namespace {

// Passes gradients on and tells the unit that they came.
struct OutputGradients final : autograd::CustomBackward {
  OutputGradients(std::shared_ptr<Unit> of, std::shared_ptr<bool> first_of_call)
      : unit(std::move(of)), first(std::move(first_of_call)) {}
  const char* name() const override { return "fully_sharded_outputs"; }
  Tensors apply(autograd::Node&, std::span<const Tensor> dout, op::InputSet) override {
    // Where a graph's backward is traced this throws, and nothing has happened yet.
    unit->before_backward(*first);
    *first = false;
    return {dout.begin(), dout.end()};
  }
  void note_failure() override { unit->context()->has_failed = true; }
  std::shared_ptr<Unit> unit;
  std::shared_ptr<bool> first;
};

struct InputGradients final : autograd::CustomBackward {
  explicit InputGradients(std::shared_ptr<Unit> of) : unit(std::move(of)) {}
  const char* name() const override { return "fully_sharded_inputs"; }
  bool always_runs() const override { return true; }
  Tensors apply(autograd::Node&, std::span<const Tensor> dout, op::InputSet) override {
    unit->after_backward();
    return {dout.begin(), dout.end()};
  }
  void note_failure() override { unit->context()->has_failed = true; }
  std::shared_ptr<Unit> unit;
};

// What is sent around a module, and what is done to its parameters there, is no part of a graph (api/compile.h):
// recorded calls run first. In a whole graph it is an error, before anything is sent.
struct OutsideOfGraphs {
  explicit OutsideOfGraphs(const char* where) : recording(graph::Recording::current()) {
    if (recording) {
      const std::string reason =
          concat(where, " of a fully sharded module, around which parameters are sent and get their requires_grad");
      if (recording->is_strict()) recording->need_values(reason);
      graph::finish_recorded(reason.c_str());
    }
    paused.emplace();
  }
  graph::Recording* recording;  // that goes on afterwards, or null
  std::optional<graph::RecordingPaused> paused;
};

bool is_recomputing() { return autograd::BackwardRun::current() != nullptr; }

}  // namespace

// ---- context

void Context::wait_for(const comm::Work& work) {
  const auto start = std::chrono::steady_clock::now();
  work.wait();
  waited += std::chrono::steady_clock::now() - start;
}

void Context::finish_reduction() {
  if (!reduction) return;
  Reduction done = std::move(*reduction);
  reduction.reset();
  done.unit->finish(done);
}

void Context::finish_backward() {
  for (const auto& entry : units) {
    const auto unit = entry.lock();
    if (unit && !unit->is_root()) unit->end_backward();
  }
  for (const auto& entry : units) {
    const auto unit = entry.lock();
    if (unit && unit->is_root()) unit->end_backward();
  }
  finish_reduction();
  is_in_backward = false;
  if (!is_last_backward) return;
  order.clear();
  for (const auto& entry : units) {
    if (const auto unit = entry.lock()) {
      unit->drop_gather();
      unit->positions_.clear();
      unit->running_.clear();
    }
  }
}

void Context::reset() {
  if (reduction) {
    try {
      reduction->work.wait();
    } catch (const CommError&) {  // NOLINT(bugprone-empty-catch): the next call that communicates tells
    }
    reduction.reset();
  }
  order.clear();
  is_in_backward = has_failed = false;
  for (const auto& entry : units) {
    if (const auto unit = entry.lock()) unit->reset();
  }
}

// ---- forward

void Unit::before_forward(size_t index, nn::Module& module, std::vector<Tensor>& inputs) {
  const OutsideOfGraphs gathers("the beginning of the forward");
  if (!context_) become_root(module);
  find_slots(index, module);
  const bool recomputes = is_recomputing();
  if (!recomputes) {
    // An exception ended the step before this one.
    const bool was_left = std::any_of(context_->units.begin(), context_->units.end(), [](const auto& entry) {
      const auto unit = entry.lock();
      return unit && unit->is_root() && unit->is_running();
    });
    if (context_->has_failed || (is_root_ && was_left)) context_->reset();
    if (is_root_) {
      for (const auto& entry : context_->units) {
        if (const auto unit = entry.lock()) unit->forget_round();
      }
    }
  }
  if (is_root_ && !recomputes) begin_round(inputs);
  if (options_.mixed_precision.parameters && options_.mixed_precision.cast_inputs) {
    cast(inputs, *options_.mixed_precision.parameters);
  }
  bool begins = false;
  if (!recomputes && !running_.contains(index)) {
    for (size_t i = 0; i < slots_.size(); ++i) running_.insert(i);
    begins = true;
  }
  if (is_stale()) reshard();
  unshard();
  wait_for_unshard();
  put_into_module();
  if (gathers.recording) {
    for (const ShardedParameter& p : parameters_) p.note_managed(*gathers.recording);
  }
  if (recomputes) return;
  if (trace::enabled()) forward_began_ = trace::Clock::now();
  for (const auto& entry : ahead_in_forward) {
    if (const auto unit = entry.lock()) unit->unshard();
  }
  if (begins && grad_enabled() && !parameters_.empty()) inputs = with_node_after(inputs);
}

Device Unit::device() const {
  // Several outermost modules may share a context; the groups of this one begin with its own.
  for (size_t i = number_ - 1; i < context_->units.size(); ++i) {
    const auto unit = context_->units[i].lock();
    if (unit && unit->is_root_ && unit.get() != this) break;
    if (!unit || unit->parameters_.empty()) continue;
    return unit->options_.offload ? unit->options_.device.value_or(kCpu) : unit->parameters_[0].sharded().device();
  }
  return kCpu;
}

void Unit::begin_round(std::vector<Tensor>& inputs) const {
  const Device there = device();
  if (there == kCpu) return;
  if (const auto updated = std::exchange(context_->updated, {})) updated->wait(current_stream(there));
  for (Tensor& x : inputs) {
    if (x.device() == kCpu && !x.is_sharded() && !x.is_sparse()) x = to(x, there);
  }
}

std::vector<Tensor> Unit::with_node_after(const std::vector<Tensor>& inputs) {
  std::vector<Tensor> passed = inputs;
  autograd::NewNode node;
  std::vector<size_t> wanted;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!is_differentiable(inputs[i].dtype())) continue;
    autograd::Edge edge = autograd::edge_of(inputs[i]);
    if (!edge.wanted()) continue;
    node.add_edge(std::move(edge));
    wanted.push_back(i);
  }
  if (wanted.empty()) return passed;
  node.set_rule(std::make_unique<InputGradients>(shared_from_this()));
  for (const size_t i : wanted) {
    passed[i] = inputs[i].alias();
    node.add_output(passed[i]);
  }
  return passed;
}

void Unit::after_forward(size_t index, std::vector<Tensor>& outputs) {
  const OutsideOfGraphs lets_go("the end of the forward");
  const bool compiles = lets_go.recording != nullptr;
  if (options_.mixed_precision.outputs) cast(outputs, *options_.mixed_precision.outputs);
  if (is_recomputing()) return;
  note_span("forward", forward_began_);
  running_.erase(index);
  if (grad_enabled() && !parameters_.empty()) {
    const auto first = std::make_shared<bool>(true);
    for (Tensor& output : outputs) {
      if (!is_differentiable(output.dtype())) continue;
      autograd::Edge edge = autograd::edge_of(output);
      if (!edge.wanted()) continue;
      autograd::NewNode node;
      node.add_edge(std::move(edge));
      node.set_rule(std::make_unique<OutputGradients>(shared_from_this(), first));
      output = output.alias();
      node.add_output(output);
    }
  }
  if (!running_.empty()) return;
  if (!parameters_.empty()) {
    positions_.push_back(context_->order.size());
    context_->order.push_back(weak_from_this());
  }
  // A graph's backward looks for parameters where its forward had them.
  if (!compiles || !grad_enabled()) reshard_after_forward();
}

void Unit::reshard_after_forward() {
  const ReshardAfterForward& policy = options_.reshard_after_forward;
  if (policy.keeps() || (policy.is_automatic() && is_root_ && grad_enabled())) return;
  if (!fewer_ || !grad_enabled()) return reshard();
  if (state_ != State::kWhole) return;
  for (ShardedParameter& p : parameters_) {
    p.keep_piece(*fewer_);
    p.take_bytes();
  }
  state_ = State::kPiece;
  note(Event::Kind::kReshard);
  put_into_module();
}

// ---- backward

void Unit::before_backward(bool first_of_call) {
  if (!first_of_call) return;
  const OutsideOfGraphs gathers("the beginning of the backward");
  if (!context_->is_in_backward) {
    context_->is_in_backward = true;
    at_end_of_backward([context = context_] { context->finish_backward(); });
  }
  unshard();
  wait_for_unshard();
  if (trace::enabled()) backward_began_ = trace::Clock::now();
  if (!ahead_in_backward.empty()) {
    for (const auto& entry : ahead_in_backward) {
      if (const auto unit = entry.lock()) unit->unshard();
    }
    return;
  }
  if (positions_.empty()) return;  // a further backward of the same forward
  const size_t position = positions_.back();
  positions_.pop_back();
  if (position == 0 || position > context_->order.size()) return;
  if (const auto next = context_->order[position - 1].lock()) next->unshard();
}

void Unit::after_backward() {
  const OutsideOfGraphs reduces("the end of the backward");
  note(Event::Kind::kPostBackward);
  note_span("backward", backward_began_);
  running_.clear();
  const NoGrad quiet;
  for (ShardedParameter& p : parameters_) {
    const Tensor fresh = gradient(p.whole());
    if (!fresh.defined()) continue;
    set_gradient(p.whole(), {});
    const Tensor local = p.local_gradient(fresh);
    const DType dtype = reduce_dtype(local.dtype());
    if (!p.accumulated.defined()) {
      p.accumulated = where_parts_are(local.dtype() == dtype ? local : to(local, dtype));
    } else {
      add_(p.accumulated, where_parts_are(local));
    }
  }
  if (reshards_after_backward) reshard();
  if (syncs) reduce();
}

void Unit::end_backward() {
  // There are gradients of this backward, or of earlier ones that were not reduced, where this one did not use the
  // group.
  const bool has_gradients = std::any_of(parameters_.begin(), parameters_.end(), [this](const ShardedParameter& p) {
    return gradient(p.whole()).defined() || (syncs && p.accumulated.defined());
  });
  if (has_gradients)
    after_backward();
  else if (state_ == State::kWhole && reshards_after_backward && context_->is_last_backward)
    reshard();
}

Tensor Unit::where_it_computes(const Tensor& x) const {
  return options_.offload && options_.device && x.device() != *options_.device ? to(x, *options_.device) : x;
}
Tensor Unit::where_parts_are(const Tensor& x) const { return options_.offload && x.device() != kCpu ? to(x, kCpu) : x; }

DType Unit::parameter_dtype(const ShardedParameter& p) const {
  const DType own = p.sharded().dtype();
  return is_floating(own) ? options_.mixed_precision.parameters.value_or(own) : own;
}

int64_t Unit::gathered_bytes(const ShardedParameter& p) const {
  return count_elems(p.local_sizes()) * static_cast<int64_t>(size_of(parameter_dtype(p)));
}

DType Unit::reduce_dtype(DType gradient) const { return options_.mixed_precision.reduce.value_or(gradient); }

double Unit::factor() const { return 1.0 / divide_factor.value_or(data_parallel_size()); }

void Unit::reduce() {
  context_->finish_reduction();
  Reduction reduction{
      .unit = shared_from_this(), .parameters = {}, .parts = {}, .sources = {}, .work = {}, .all_reduces = all_reduces};
  for (size_t i = 0; i < parameters_.size(); ++i) {
    ShardedParameter& p = parameters_[i];
    Tensor gradient = std::exchange(p.accumulated, {});
    if (!gradient.defined()) {
      if (!reduces_unused || !p.wants_gradient()) continue;
      gradient = p.room(reduce_dtype(parameter_dtype(p)));
      zero_(gradient);
    }
    CHORALE_CHECK_STATE(reduction.sources.empty() || reduction.sources[0].dtype() == gradient.dtype(),
                        "[fully_shard] gradients of one group have one dtype: ", p.name, " has ", gradient.dtype(),
                        ", others have ", reduction.sources[0].dtype(), "; put it into a group of its own");
    reduction.parameters.push_back(i);
    reduction.sources.push_back(std::move(gradient));
  }
  if (reduction.parameters.empty()) return;
  const comm::Group& group = shards();
  const double scale = forces_sum ? 1 : factor();
  if (trace::enabled()) reduction.launched = trace::Clock::now();
  if (group.size() == 1) {
    for (const Tensor& source : reduction.sources) reduction.parts.push_back(scale == 1 ? source : mul(source, scale));
  } else {
    comm::Coalescing together(group);
    for (size_t k = 0; k < reduction.parameters.size(); ++k) {
      const ShardedParameter& p = parameters_[reduction.parameters[k]];
      const Tensor& source = reduction.sources[k];
      std::vector<Tensor> chunks;
      chunks.reserve(static_cast<size_t>(group.size()));
      for (int r = 0; r < group.size(); ++r) chunks.push_back(p.chunk(source, group.size(), r));
      const Tensor& own = chunks[static_cast<size_t>(group.rank())];
      reduction.parts.push_back(Tensor::empty(own.sizes(), own.dtype(), own.device()));
      std::ignore = group.reduce_scatter(reduction.parts.back(), chunks, comm::premultiplied_sum(scale),
                                         {.tag = number_, .timeout = {}});
    }
    reduction.work = together.end();
    wake_helper(group);
  }
  context_->reduction = std::move(reduction);
}

void Unit::finish(Reduction& reduction) {
  context_->wait_for(reduction.work);
  note_span("reduce", reduction.launched, &reduction.work);
  reduction.sources.clear();
  const NoGrad quiet;
  const bool has_replicas = options_.mesh.dims() == 2 && options_.mesh.shape()[0] > 1;
  if (has_replicas) {
    for (size_t k = 0; k < reduction.parameters.size(); ++k) {
      ShardedParameter& p = parameters_[reduction.parameters[k]];
      if (p.unreplicated.defined()) add_(reduction.parts[k], std::exchange(p.unreplicated, {}));
      if (!reduction.all_reduces) p.unreplicated = reduction.parts[k];
    }
    if (!reduction.all_reduces) return;
    context_->wait_for(
        options_.mesh.group(size_t{0}).all_reduce_coalesced(reduction.parts, {}, {.tag = number_, .timeout = {}}));
  }
  for (size_t k = 0; k < reduction.parameters.size(); ++k) {
    if (forces_sum) mul_(reduction.parts[k], factor());
    parameters_[reduction.parameters[k]].add_gradient(reduction.parts[k]);
  }
}

// ---- the rest

void Unit::reset() {
  if (gather_) {
    try {
      wait_for_unshard();
    } catch (const CommError&) {  // NOLINT(bugprone-empty-catch): the next call that communicates tells
    }
  }
  for (ShardedParameter& p : parameters_) {
    set_gradient(p.whole(), {});
    p.accumulated = p.unreplicated = {};
  }
  positions_.clear();
  running_.clear();
  reshard();
}

void Unit::note(Event::Kind kind) const {
  if (context_ && context_->listener) context_->listener({kind, path_});
}

void Unit::wake_helper(const comm::Group& group) const {
  if (!context_ || group.moves_by_itself()) return;
  // The same holds for DDP's buckets: without a core of its own a thread takes turns with what it should hide behind.
  const bool has_room =
      static_cast<int>(std::thread::hardware_concurrency()) >= data_parallel_size() * (thread_count() + 1);
  if (options_.helper_thread.value_or(has_room))
    context_->helpers.try_emplace(group.engine().get(), group.engine()).first->second.wake();
}

void Unit::note_span(const char* what, trace::Clock::time_point& began, const comm::Work* work) const {
  if (began == trace::Clock::time_point{}) [[likely]]
    return;
  trace::record({.name = concat(what, " ", path_.empty() ? "the rest" : path_),
                 .rank = trace::rank(),
                 .start = std::exchange(began, {}),
                 .end = work && !work->is_nothing() ? work->completed_at() : trace::Clock::now(),
                 .async = work != nullptr,
                 .kind = work ? trace::Kind::kBucket : trace::Kind::kSpan});
}

void Unit::cast(std::vector<Tensor>& tensors, DType dtype) const {
  for (Tensor& x : tensors) {
    if (is_floating(x.dtype()) && x.dtype() != dtype) x = to(x, dtype);
  }
}

}  // namespace chorale::fsdp
