#include "chorale/parallel/ddp.h"

#include <algorithm>
#include <string_view>

#include "chorale/autograd/new_node.h"
#include "chorale/base/comm_error.h"
#include "chorale/base/debug_level.h"
#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/comm/mesh_places.h"
#include "chorale/graph/recording.h"
#include "chorale/graph/split.h"
#include "chorale/nn/linear.h"
#include "chorale/op/collective.h"
#include "chorale/parallel/sync_batch_norm.h"
#include "chorale/parallel/traced_reduction.h"

namespace chorale::parallel {

struct DataParallelBase::Link {
  explicit Link(DataParallelBase* owner) : ddp(owner) {}
  DataParallelBase* ddp;

  // Whole graphs (traced_reduction.h) have the group as an operand, and the backward that is being traced.
  Tensor group_operand;
  std::optional<TracedReduction> traced;
  void set_group_operand();
  void trace_forward(bool reduced);
  void mark_ready(size_t index);
};

// The identity on the outputs of a forward, through which backward must come: here the reduction begins, even when no
// gradient reaches any parameter of this rank. A gradient that did not arrive stays undefined; zeros would make
// parameters look used.
struct DataParallelBase::PassThrough final : autograd::CustomBackward {
  explicit PassThrough(std::shared_ptr<Link> to) : link(std::move(to)) {}
  std::shared_ptr<Link> link;

  const char* name() const override { return "outputs of DistributedDataParallel"; }
  bool always_runs() const override { return true; }
  Tensors apply(autograd::Node&, std::span<const Tensor> dout, op::InputSet) override {
    // Gradients that are only asked for (grad()) are not accumulated, and hence not averaged.
    const autograd::BackwardRun* run = autograd::BackwardRun::current();
    if (link->ddp && run && !run->is_capturing()) link->ddp->begin_backward();
    return Tensors(dout);
  }
  void note_failure() override {
    if (link->ddp) link->ddp->note_exception();
  }
};

namespace {

// What a user may do about it, where the other rank is well and simply not there: most often it had fewer batches.
const char* advice_on(std::string_view error) {
  const auto says = [&](const char* words) { return error.find(words) != std::string_view::npos; };
  const bool is_elsewhere = says(" has left the group") || says(": timed out");
  if (!is_elsewhere || says(" threw: ") || says("parallel::join")) return nullptr;
  return "; DistributedDataParallel waits for gradients of every rank: where ranks have different numbers of batches, "
         "train inside of parallel::join";
}

}  // namespace

template <class F>
auto DataParallelBase::logged(const F& f) {
  try {
    return options_.mesh ? comm::with_places(*options_.mesh, f) : f();
  } catch (const CommError& error) {
    const char* advice = current_join() ? nullptr : advice_on(error.what());
    recorder_.note_error(error.what());
    if (!advice) throw;
    throw CommError(concat(error.what(), advice), error.failure());
  } catch (const std::exception& error) {
    recorder_.note_error(error.what());
    throw;
  }
}

// ---- construction

DataParallelBase::DataParallelBase() : link_(std::make_shared<Link>(this)) {}

DataParallelBase::~DataParallelBase() {
  remove_hooks();
  link_->ddp = nullptr;
}

void DataParallelBase::attach(nn::Module& module, const comm::Group& group, const DdpOptions& options) {
  CHORALE_CHECK_STATE(!options.mesh, "[ddp] give a group or a mesh, not both; the mesh is a ", *options.mesh);
  wrap(module, group, options);
}

void DataParallelBase::attach(nn::Module& module, const DdpOptions& options) {
  CHORALE_CHECK(options.mesh, "[ddp] give a group or a mesh");
  CHORALE_CHECK_STATE(options.mesh->dims() == 1, "[ddp] replicas need a mesh of one dimension, not a ", *options.mesh);
  comm::with_places(*options.mesh, [&] { wrap(module, options.mesh->group(size_t{0}), options); });
}

namespace {
// Parameters with sparse gradients.
std::vector<Tensor> sparse_tables(nn::Module& module) {
  std::vector<Tensor> tables;
  for (const auto& [name, part] : module.named_modules()) {
    auto* embedding = dynamic_cast<nn::Embedding*>(part);
    if (embedding && embedding->options().sparse) tables.push_back(embedding->weight);
  }
  return tables;
}
}  // namespace

void DataParallelBase::wrap(nn::Module& module, const comm::Group& group, const DdpOptions& options) {
  module_ = &module;
  options_ = options;
  ignored_ = {options.ignore.begin(), options.ignore.end()};
  localized_ = Localized(module, ignored_);
  parameters_ = parallel::managed_parameters(module, options.ignore);
  CHORALE_CHECK_STATE(!parameters_.empty(), "[ddp] ", module.type_name(),
                      " has no parameter that requires a gradient: there is nothing to reduce");
  CHORALE_CHECK(group.is_member(), "[ddp] this rank is not in the group");
  CHORALE_CHECK(!options.bucket_cap_mb || *options.bucket_cap_mb > 0, "[ddp] bucket_cap_mb must be positive, not ",
                options.bucket_cap_mb.value_or(0));
  for (const auto& [name, parameter] : parameters_) {
    CHORALE_CHECK_STATE(parameter.device().type != DeviceType::kNull, "[ddp] parameter ", name,
                        " is on device null; parameters must have values: materialize() the module first");
  }
  // What goes wrong in our communication must not break the caller's group.
  comm::Group own = group.duplicate();
  parallel::verify_parameters(own, parameters_);
  std::vector<reducer::GradientInfo> infos;
  const std::vector<Tensor> tables = sparse_tables(module);
  for (const auto& [name, parameter] : parameters_) {
    const bool sparse = std::any_of(tables.begin(), tables.end(),
                                    [&, &own_tensor = parameter](const Tensor& table) { return table.is(own_tensor); });
    infos.push_back({name, parameter.sizes(), parameter.strides(), parameter.dtype(), sparse, parameter.device()});
  }
  reducer::ReducerOptions how{.find_unused = options.find_unused_parameters,
                              .gradient_as_bucket_view = options.gradient_as_bucket_view,
                              .static_graph = options.static_graph,
                              .progress = options.progress};
  if (options.mixed_precision) {
    const MixedPrecision& precision = *options.mixed_precision;
    how.reduce_dtype = precision.reduce ? precision.reduce : precision.parameters;
  }
  if (options.bucket_cap_mb) how.bucket_cap_bytes = static_cast<size_t>(*options.bucket_cap_mb * 1024 * 1024);
  reducer::GradientOwner& owner = *this;
  reducer_ = std::make_unique<reducer::Reducer>(std::move(own), owner, std::move(infos), how);
  if (options.sync_module_states) broadcast_states(reducer_->group().global_rank(0));
  if (options.mixed_precision) mixed_.emplace(module, *options.mixed_precision, ignored_);
  link_->set_group_operand();
  add_hooks();
  if (debug_level() != DebugLevel::kOff && reducer_->group().rank() == 0) {
    const DdpLog setup = log();
    log_info(concat("[ddp] ", setup.module_name, " on ", setup.world_size, " ranks (", setup.backend_name,
                    "): ", setup.num_parameter_tensors, " parameters, ", setup.total_parameter_size_bytes,
                    " bytes of gradients, moved by ", setup.progress));
  }
}

void DataParallelBase::add_hooks() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Tensor& parameter = parameters_[i].second;
    set_completed_by_other(parameter, true);
    hooks_.push_back(after_accumulate(parameter, [this, i](const Tensor&) { link_->mark_ready(i); }));
  }
}

void DataParallelBase::remove_hooks() {
  if (hooks_.empty()) return;
  for (HookHandle& hook : hooks_) hook.remove();
  hooks_.clear();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    set_completed_by_other(parameters_[i].second, false);
    set_destination(i, {});
  }
}

void DataParallelBase::set_gradient(size_t index, const Tensor& gradient) {
  autograd::current_sink().set_gradient(parameters_[index].second, gradient);
}

void DataParallelBase::move_out(size_t index, const Tensor& view) {
  const Tensor& parameter = parameters_[index].second;
  const Tensor own = chorale::gradient(parameter);
  if (own.defined() && own.raw() == view.raw()) chorale::set_gradient(parameter, clone(own));
}

void DataParallelBase::set_destination(size_t index, const Tensor& view) {
  set_gradient_destination(parameters_[index].second, view);
}

void DataParallelBase::broadcast_states(int root) {
  const auto send = [&](const NamedTensors& tensors) {
    std::vector<comm::Work> works;
    for (const auto& [name, tensor] : tensors) {
      if (!ignored_.contains(name)) works.push_back(group().broadcast(tensor, root));
    }
    for (const comm::Work& work : works) work.wait();
  };
  send(module_->named_parameters());
  if (options_.broadcast_buffers) send(module_->named_buffers());
}

void DataParallelBase::sync_module_states(int source) {
  logged([&] { broadcast_states(source); });
}

namespace {
// What a compiler is told while a forward runs, from its beginning to its end or to the exception that it throws. What
// happens around the module's own forward is no part of a graph: recorded calls run before and behind it.
struct ActiveForward {
  ActiveForward(const void* owner, graph::ActiveDdp told) : ddp(owner), module(std::move(told)) {}
  const void* ddp;
  graph::ActiveDdp module;
  graph::ActiveDdpScope scope{module};
};
thread_local std::vector<std::unique_ptr<ActiveForward>> active_forwards;  // the innermost last

void end_active_forward(const void* ddp) {
  if (!active_forwards.empty() && active_forwards.back()->ddp == ddp) active_forwards.pop_back();
}
}  // namespace

void DataParallelBase::note_exception() {
  end_active_forward(this);
  try {
    throw;
  } catch (const std::exception& error) {
    group().note_exception(error.what());
  } catch (...) {
    group().note_exception("of a type that is not std::exception");
  }
}

NamedTensors DataParallelBase::sharded_state_dict() {
  NamedTensors state;
  for (const auto& [name, tensor] : module_->named_parameters()) state.emplace_back(name, localized_.sharded(tensor));
  for (const auto& [name, tensor] : module_->named_buffers()) state.emplace_back(name, localized_.sharded(tensor));
  return state;
}

// ---- whole graphs: host code runs when they are traced, and never again

namespace {
bool is_traced_whole() {
  const graph::Recording* recording = graph::Recording::current();
  return recording && recording->is_strict();
}
}  // namespace

// The same tensor for as long as this object lives. Other memory tells graphs that hold it that the group is another.
void DataParallelBase::Link::set_group_operand() {
  const Tensor made = group_tensor(ddp->group());
  if (!group_operand.defined()) {
    group_operand = made;
    return;
  }
  Tensor::Impl& own = *group_operand.impl();
  own.storage = made.impl()->storage;
  own.data = made.impl()->data;
  own.extension = made.extension()->copy();
}

void DataParallelBase::Link::trace_forward(bool reduced) {
  const char* what = ddp->is_joined_.read("whether a module is in join()") != 0 ? "join()"
                     : ddp->mixed_                                              ? "mixed_precision"
                     : ddp->buffer_hook_.run                                    ? "a buffer hook"
                     : ddp->reducer_->hook()                                    ? "a communication hook"
                     : !ddp->reducer_->owners().empty()                         ? "a gradient that one rank keeps"
                                                                                : nullptr;
  CHORALE_CHECK_STATE(!what, "[ddp] ", what, " is no part of whole graphs yet; compile without whole_graph");
  if (ddp->options_.broadcast_buffers && reduced) {
    const NoGrad quiet;
    for (const Tensor& buffer : ddp->buffers()) {
      copy_(buffer, broadcast(buffer, group_operand, ddp->group().global_rank(0)));
    }
  }
  // Gradients are made where the graph wants them, not in buckets.
  for (size_t i = 0; i < ddp->parameters_.size(); ++i) ddp->set_destination(i, {});
  traced.reset();
  if (reduced) traced.emplace(ddp->parameters_, group_operand);
}

void DataParallelBase::Link::mark_ready(size_t index) {
  if (!is_traced_whole()) {
    ddp->begin_backward();
    ddp->logged([&] { ddp->reducer_->mark_ready(index); });
    return;
  }
  if (!traced) return ddp->complete(index);
  if (!traced->has_begun()) {
    at_end_of_backward([this] {
      traced->finish();
      traced.reset();
    });
  }
  traced->mark_ready(index);
}

// ---- forward

DataParallelBase::ForwardScope::ForwardScope(DataParallelBase& ddp)
    : ddp_(ddp), records_(grad_enabled()), reduced_(records_ && ddp.is_synchronizing()) {
  if (is_traced_whole()) {
    ddp_.link_->trace_forward(reduced_);
    if (!ddp_.localized_.empty()) ddp_.localized_.enter(*ddp_.module_, shadows_);
    return;
  }
  graph::finish_recorded("the forward of a data-parallel module begins");
  ddp_.logged([&] { ddp_.before_forward(records_); });
  if (!ddp_.localized_.empty()) ddp_.localized_.enter(*ddp_.module_, shadows_);
  if (ddp_.mixed_) ddp_.mixed_->enter(shadows_);
  active_forwards.push_back(std::make_unique<ActiveForward>(
      &ddp, graph::ActiveDdp{graph::bucket_bytes(ddp.options_.bucket_cap_mb.value_or(25)),
                             [&ddp](const Tensor& parameter) {
                               const NamedTensors all = ddp.module_->named_parameters();
                               // Anything else that wants a gradient, an input say, is in no bucket either.
                               return std::none_of(all.begin(), all.end(), [&](const auto& entry) {
                                 return entry.second.is(parameter) && !ddp.ignored_.contains(entry.first);
                               });
                             },
                             [&ddp](const Tensor& parameter) -> std::string {
                               for (const auto& [name, tensor] : ddp.module_->named_parameters()) {
                                 if (tensor.is(parameter)) return name;
                               }
                               return {};
                             }}));
}

void DataParallelBase::ForwardScope::pass(Tensor& output) {
  if (is_traced_whole()) return;
  try {
    graph::finish_recorded("the forward of a data-parallel module ends");
  } catch (...) {
    end_active_forward(&ddp_);
    throw;
  }
  if (!reduced_ || !is_differentiable(output.dtype())) return;
  autograd::Edge edge = autograd::edge_of(output);
  if (!edge.wanted()) return;
  if (!node_) node_.emplace();
  node_->add_edge(std::move(edge));
  output = output.alias();
  node_->add_output(output);
}

void DataParallelBase::ForwardScope::finish() {
  if (is_traced_whole()) {
    shadows_.undo();
    return span_.end();
  }
  end_active_forward(&ddp_);
  shadows_.undo();
  if (node_) node_->set_rule(std::make_unique<PassThrough>(ddp_.link_));
  ddp_.logged([&] { ddp_.after_forward(records_, reduced_); });
  span_.end();
}

void DataParallelBase::before_forward(bool records) {
  if (records) {
    reducer_->check_finished();
    if (is_synchronizing()) recorder_.start_step(*reducer_);
  }
  if (Join* join = current_join(); join && join->options().enabled) {
    recorder_.note_join();
    join->notify(*this);
  }
  if (records) reducer_->rebuild_if_due();
  if (buffers_are_due()) sync_buffers();
}

void DataParallelBase::after_forward(bool records, bool reduced) {
  if (buffer_hook_.run && buffer_hook_.place == BufferHook::Place::kAfterForward && buffers_are_due()) {
    run_buffer_hook();
  }
  buffers_due_ = reduced;
  if (records) reducer_->expect_backward(reduced);
  Join* join = current_join();
  if (!join || !join->options().enabled) return;
  tell_whether_reduced(reduced);
  if (reduced && !join->options().divide_by_initial_size) reducer_->set_divisor(join->live_ranks());
}

bool DataParallelBase::tell_whether_reduced(bool reduced) {
  int32_t count = reduced ? 1 : 0;
  group().all_reduce(std::span(&count, 1)).wait();
  return count > 0;
}

// ---- backward

void DataParallelBase::begin_backward() {
  const bool elsewhere = &autograd::current_sink() != &autograd::grad_field_sink();
  if (!reducer_->begin_backward(elsewhere)) return;
  // Gradients are sent as bytes: those that were recorded come first, and the rest of this backward is not recorded.
  std::shared_ptr<graph::RecordingPaused> paused;
  if (graph::Recording::current()) {
    graph::finish_recorded("a data-parallel module begins to average gradients");
    paused = std::make_shared<graph::RecordingPaused>();
  }
  at_end_of_backward([this, paused] { end_backward(); });
}

void DataParallelBase::end_backward() {
  logged([&] {
    reducer_->end_backward();
    for (const comm::Future& future : std::exchange(buffer_futures_, {})) future.wait();
  });
}

void DataParallelBase::check_finished() {
  logged([&] { reducer_->check_finished(); });
}

void DataParallelBase::verify_parameters() {
  logged([&] { parallel::verify_parameters(group(), parallel::managed_parameters(*module_, options_.ignore)); });
}

reducer::BucketAssignment DataParallelBase::assign_buckets(std::span<const Tensor> tensors,
                                                           std::span<const size_t> limits) {
  return logged([&] { return reducer::assign_buckets(tensors, limits); });
}

// ---- changes

void DataParallelBase::register_comm_hook(CommHook hook) {
  logged([&] { reducer_->set_hook(std::move(hook)); });
}

void DataParallelBase::set_gradient_owners(std::vector<int> owners) {
  logged([&] { reducer_->set_owners(std::move(owners)); });
}

void DataParallelBase::register_buffer_hook(BufferHook hook) {
  logged([&] {
    CHORALE_CHECK(hook.run, "[ddp] a buffer hook must be a function, not null");
    buffer_hook_ = std::move(hook);
  });
}

void DataParallelBase::set_static_graph() {
  logged([&] {
    if (!reducer_->set_static_graph()) log_warning("[ddp] the graph was declared static before");
  });
}

void DataParallelBase::set_group(const comm::Group& group) {
  logged([&] {
    // Leaving the old group first ends the wait of a rank that still expects something of this one there.
    buffer_futures_.clear();
    const std::vector<int> before = members_of(this->group());
    reducer_->set_group({});
    buffers_due_ = true;
    move_sync_batchnorm(*module_, before, group);
    if (group.is_member()) {
      reducer_->set_group(group.duplicate());
      link_->set_group_operand();
    }
  });
}

void DataParallelBase::set_sample_rate(int64_t steps) {
  CHORALE_CHECK(steps > 0, "[ddp] the sample rate is a number of steps, not ", steps);
  recorder_.set_sample_rate(steps);
}

DdpLog DataParallelBase::log() const {
  DdpLog log = recorder_.log();
  parallel::describe(*reducer_, log);
  log.module_name = module_->type_name();
  log.broadcast_buffers = options_.broadcast_buffers;
  log.has_sync_bn = has_sync_batchnorm(*module_);
  if (const Device device = parameters_.front().second.device(); device != kCpu) {
    log.device_ids = std::to_string(device.index);
    log.output_device = device.index;
  }
  return log;
}

// ---- join

void DataParallelBase::shadow_step(Join& join) {
  logged([&] {
    recorder_.note_join();
    reducer_->rebuild_if_due();
    if (buffers_are_due() && !buffer_hook_.run) broadcast_buffers(agree_on_live_rank(false));
    const bool reduced = tell_whether_reduced(false);
    buffers_due_ = reduced;
    if (!reduced) return;
    if (!join.options().divide_by_initial_size) reducer_->set_divisor(join.live_ranks());
    reducer_->shadow_backward(join.is_shared());
  });
}

void DataParallelBase::after_join(int authority) {
  logged([&] { broadcast_states(authority); });
}

}  // namespace chorale::parallel
