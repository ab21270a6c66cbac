#include "../ddp.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <algorithm>

#include "../csrc/convert.h"
#include "chorale/base/error.h"

namespace chorale_torch {

using chorale::comm::Group;
namespace reducer = chorale::reducer;

struct DataParallelBase::Link {
  DataParallelBase* ddp;
};

// The identity on the outputs of a forward, through which backward must come: here the reduction begins, even when no
// gradient reaches any parameter of this rank. A gradient that did not arrive stays undefined.
struct DataParallelBase::Outputs final : torch::autograd::Node {
  Outputs(std::shared_ptr<Link> to, torch::autograd::edge_list edges) : Node(std::move(edges)), link(std::move(to)) {}
  std::shared_ptr<Link> link;

  std::string name() const override { return "OutputsOfDistributedDataParallel"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    // Gradients that are only asked for (torch::autograd::grad) are not accumulated, and hence not averaged.
    const auto* only = torch::autograd::get_current_graph_task_exec_info();
    if (link->ddp && (!only || only->empty())) link->ddp->begin_backward();
    return std::move(gradients);
  }
};

// ---- construction

DataParallelBase::DataParallelBase(std::shared_ptr<torch::nn::Module> module, const Group& group, DdpOptions options)
    : any_module_(std::move(module)), options_(std::move(options)), link_(std::make_shared<Link>(Link{this})) {
  CHORALE_CHECK(group.is_member(), "[ddp] this rank is not in the group");
  CHORALE_CHECK(!options_.bucket_cap_mb || *options_.bucket_cap_mb > 0, "[ddp] bucket_cap_mb must be positive, not ",
                options_.bucket_cap_mb.value_or(0));
  find_parameters();
  // What goes wrong in our communication must not break the caller's group.
  Group own = group.duplicate();
  verify_parameters(own);
  std::vector<reducer::GradientInfo> infos;
  for (const Managed& managed : managed_) {
    const chorale::Tensor view = view_of(managed.tensor);
    infos.push_back({managed.name, view.sizes(), view.strides(), view.dtype(), managed.sparse});
  }
  reducer::ReducerOptions how{.find_unused = options_.find_unused_parameters,
                              .gradient_as_bucket_view = options_.gradient_as_bucket_view,
                              .static_graph = options_.static_graph,
                              .progress = options_.progress};
  if (options_.bucket_cap_mb) how.bucket_cap_bytes = static_cast<size_t>(*options_.bucket_cap_mb * 1024 * 1024);
  reducer::GradientOwner& owner = *this;
  reducer_ = std::make_unique<reducer::Reducer>(std::move(own), owner, std::move(infos), how);
  if (options_.sync_module_states) broadcast_states(reducer_->group().global_rank(0));
  add_hooks();
}

DataParallelBase::~DataParallelBase() {
  for (Managed& managed : managed_) managed.accumulator->del_post_hook(managed.hook);
  link_->ddp = nullptr;
}

bool DataParallelBase::is_ignored(const std::string& name) const {
  return std::find(options_.ignore.begin(), options_.ignore.end(), name) != options_.ignore.end();
}

void DataParallelBase::find_parameters() {
  std::vector<at::Tensor> tables;
  for (const auto& part : any_module_->modules()) {
    const auto* embedding = part->as<torch::nn::EmbeddingImpl>();
    if (embedding && embedding->options.sparse()) tables.push_back(embedding->weight);
    const auto* bag = part->as<torch::nn::EmbeddingBagImpl>();
    if (bag && bag->options.sparse()) tables.push_back(bag->weight);
  }
  for (const auto& entry : any_module_->named_parameters()) {
    if (!entry.value().requires_grad() || is_ignored(entry.key())) continue;
    CHORALE_CHECK_STATE(entry.value().device().is_cpu(), "[ddp] parameter ", entry.key(), " is on ",
                        entry.value().device().str(), "; parameters must be on the CPU");
    const bool named = std::find(options_.sparse.begin(), options_.sparse.end(), entry.key()) != options_.sparse.end();
    const bool found =
        std::any_of(tables.begin(), tables.end(), [&](const auto& t) { return t.is_same(entry.value()); });
    managed_.push_back({entry.key(), entry.value(), named || found, {}, 0, {}, {}});
  }
  CHORALE_CHECK_STATE(!managed_.empty(), "[ddp] ", any_module_->name(),
                      " has no parameter that requires a gradient: there is nothing to reduce");
}

namespace {
std::vector<std::string> lines_of(std::span<const uint8_t> text) {
  std::vector<std::string> lines;
  std::istringstream stream(std::string(text.begin(), text.end()));
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}
}  // namespace

// Every rank must have the same parameters: their number, and each one's name, type and shape. They are compared as
// text, one line each.
void DataParallelBase::verify_parameters(const Group& group) const {
  std::ostringstream text;
  for (const Managed& managed : managed_) {
    text << managed.name << ", " << managed.tensor.scalar_type() << ' ' << managed.tensor.sizes() << " with strides "
         << managed.tensor.strides() << '\n';
  }
  const std::string written = text.str();
  const std::vector<uint8_t> own(written.begin(), written.end());
  const std::vector<int64_t> bytes{static_cast<int64_t>(own.size())};
  std::vector<int64_t> counts(static_cast<size_t>(group.size()));
  group.all_gather_into(std::span(counts), std::span(bytes)).wait();
  std::vector<chorale::Tensor> all;
  for (const int64_t count : counts) all.push_back(chorale::Tensor::empty({count}, chorale::DType::kU8));
  group.all_gather(all, chorale::Tensor::from(own, {bytes[0]})).wait();
  const std::vector<std::string> ours = lines_of(own);
  for (int r = 0; r < group.size(); ++r) {
    const std::vector<std::string> theirs = lines_of(all[static_cast<size_t>(r)].span<uint8_t>());
    for (size_t i = 0; i < std::max(ours.size(), theirs.size()); ++i) {
      const std::string here = i < ours.size() ? ours[i] : "missing", there = i < theirs.size() ? theirs[i] : "missing";
      CHORALE_CHECK_STATE(here == there, "[ddp] parameter ", i, " is ", here, " on rank ",
                          group.global_rank(group.rank()), " and ", there, " on rank ", group.global_rank(r),
                          "; every rank must have the same module");
    }
  }
}

void DataParallelBase::add_hooks() {
  for (size_t i = 0; i < managed_.size(); ++i) {
    Managed& managed = managed_[i];
    managed.accumulator = torch::autograd::impl::grad_accumulator(managed.tensor);
    using List = torch::autograd::variable_list;
    managed.hook = managed.accumulator->add_post_hook(
        std::make_unique<torch::autograd::utils::LambdaPostHook>([this, i](const List& outputs, const List&) {
          begin_backward();
          reducer_->mark_ready(i);
          return outputs;
        }));
  }
}

// ---- gradients

chorale::Tensor DataParallelBase::gradient(size_t index) {
  const Managed& managed = managed_[index];
  const at::Tensor& grad = managed.tensor.grad();
  if (!grad.defined()) return {};
  if (managed.grad.defined() && grad.is_same(managed.grad)) return managed.shown;
  if (!grad.is_sparse()) return view_of(grad);
  return sparse_view_of(grad.coalesce());
}

void DataParallelBase::set_gradient(size_t index, const chorale::Tensor& gradient) {
  Managed& managed = managed_[index];
  managed.shown = gradient;
  managed.grad = tensor_of(gradient);
  managed.tensor.mutable_grad() = managed.grad;
}

void DataParallelBase::begin_backward() {
  if (!reducer_->begin_backward()) return;
  torch::autograd::Engine::get_default_engine().queue_callback([link = link_] {
    if (link->ddp) link->ddp->reducer_->end_backward();
  });
}

void DataParallelBase::register_comm_hook(CommHook hook) {
  CHORALE_CHECK(hook.run, "[ddp] a communication hook must be a function, not null");
  reducer_->set_hook(
      {hook.name, [run = hook.run](reducer::GradBucket& bucket) {
         auto wait = run({bucket.index(), bucket.is_last(), tensor_of(bucket.buffer()), bucket.group()});
         return reducer::ready_future(bucket.buffer())
             .then([wait = std::move(wait)](const chorale::Tensors&) -> chorale::Tensors { return {view_of(wait())}; });
       }});
}

// ---- forward

DataParallelBase::ForwardScope::ForwardScope(DataParallelBase& ddp)
    : ddp_(ddp), records_(at::GradMode::is_enabled()), reduced_(records_ && ddp.synchronizes_) {
  auto& reducer = *ddp_.reducer_;
  if (records_) reducer.check_finished();
  auto* join = ddp_.current_join();
  const bool joining = join && join->options().enabled;
  if (joining) join->notify(ddp_);
  if (records_) reducer.rebuild_if_due();
  if (ddp_.options_.broadcast_buffers && ddp_.buffers_due_) {
    const auto buffers = ddp_.named_buffers();
    if (!buffers.is_empty())
      ddp_.broadcast(buffers, joining ? ddp_.agree_on_live_rank(true) : reducer.group().global_rank(0));
  }
}

void DataParallelBase::ForwardScope::pass(at::Tensor& output) {
  if (reduced_ && output.requires_grad()) outputs_.push_back(&output);
}

void DataParallelBase::ForwardScope::finish() {
  if (!outputs_.empty()) {
    torch::autograd::edge_list edges;
    for (const at::Tensor* output : outputs_) edges.push_back(torch::autograd::impl::gradient_edge(*output));
    const auto node = c10::make_intrusive<Outputs>(ddp_.link_, std::move(edges));
    for (at::Tensor* output : outputs_) {
      at::Tensor passed = output->detach();
      torch::autograd::create_gradient_edge(passed, node);
      *output = std::move(passed);
    }
  }
  ddp_.buffers_due_ = reduced_;
  if (records_) ddp_.reducer_->expect_backward(reduced_);
  auto* join = ddp_.current_join();
  if (!join || !join->options().enabled) return;
  ddp_.tell_whether_reduced(reduced_);
  if (reduced_ && !join->options().divide_by_initial_size) ddp_.reducer_->set_divisor(join->live_ranks());
}

// ---- states of the module

void DataParallelBase::broadcast(const torch::OrderedDict<std::string, at::Tensor>& tensors, int root) const {
  std::vector<chorale::comm::Work> works;
  for (const auto& entry : tensors) {
    if (!is_ignored(entry.key())) works.push_back(reducer_->group().broadcast(view_of(entry.value(), true), root));
  }
  for (const auto& work : works) work.wait();
}

void DataParallelBase::broadcast_states(int root) const {
  broadcast(any_module_->named_parameters(), root);
  if (options_.broadcast_buffers) broadcast(any_module_->named_buffers(), root);
}

// ---- join

bool DataParallelBase::tell_whether_reduced(bool reduced) const {
  int32_t count = reduced ? 1 : 0;
  reducer_->group().all_reduce(std::span(&count, 1)).wait();
  return count > 0;
}

// The highest rank that still has inputs: rank 0 may have none.
int DataParallelBase::agree_on_live_rank(bool alive) const {
  const Group& group = reducer_->group();
  int32_t rank = alive ? group.rank() : -1;
  group.all_reduce(std::span(&rank, 1), chorale::Reduce::kMax).wait();
  return group.global_rank(rank);
}

void DataParallelBase::shadow_step(reducer::Join& join) {
  reducer_->rebuild_if_due();
  const auto buffers = named_buffers();
  if (options_.broadcast_buffers && buffers_due_ && !buffers.is_empty()) broadcast(buffers, agree_on_live_rank(false));
  const bool reduced = tell_whether_reduced(false);
  buffers_due_ = reduced;
  if (!reduced) return;
  if (!join.options().divide_by_initial_size) reducer_->set_divisor(join.live_ranks());
  reducer_->shadow_backward();
}

void DataParallelBase::after_join(int authority) { broadcast_states(authority); }

}  // namespace chorale_torch
