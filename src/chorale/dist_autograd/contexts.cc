#include "chorale/dist_autograd/contexts.h"

#include <algorithm>

#include "chorale/autograd/new_node.h"
#include "chorale/base/rpc_error.h"
#include "chorale/dist_autograd/context.h"
#include "chorale/dist_autograd/run.h"
#include "chorale/trace/trace.h"

namespace chorale::dist_autograd {
namespace {

struct Current {
  Contexts* contexts = nullptr;
  uint64_t id = 0;
};
constinit thread_local Current of_thread;

// Where tensors left for another worker.
struct SendBackward final : autograd::CustomBackward {
  const char* name() const override { return "send"; }
  Tensors apply(autograd::Node&, std::span<const Tensor> dout, op::InputSet) override {
    const trace::Span span("dist_autograd:send");
    return Tensors(dout);
  }
};

}  // namespace

// ---- the thread's context

Scope::Scope(Contexts& contexts, uint64_t id) : id_(id), before_contexts_(of_thread.contexts), before_(of_thread.id) {
  of_thread = {&contexts, id};
}
Scope::~Scope() { of_thread = {before_contexts_, before_}; }
uint64_t Scope::current() { return of_thread.id; }

Context::~Context() { contexts_.close(id()); }

uint64_t Contexts::open() {
  if (of_thread.contexts == this && of_thread.id != 0)
    throw RpcError(RpcErrorKind::kNestedContext, worker_,
                   concat("[dist_autograd] this thread is in context ", of_thread.id, " already; end that one first"));
  const uint64_t id = static_cast<uint64_t>(worker_) << 48 | next_context_.fetch_add(1);
  get_or_create(id);
  return id;
}

std::shared_ptr<ContextState> Contexts::find(uint64_t id) const {
  const Shard& shard = shard_of(id);
  const std::lock_guard lock(shard.mutex);
  const auto found = shard.contexts.find(id);
  return found == shard.contexts.end() ? nullptr : found->second;
}

std::shared_ptr<ContextState> Contexts::get(uint64_t id) const {
  auto context = find(id);
  if (!context)
    throw RpcError(
        RpcErrorKind::kUnknownContext, worker_,
        concat("[dist_autograd] worker ", worker_, " knows no context ", id, "; it has ended, or never was"));
  return context;
}

std::shared_ptr<ContextState> Contexts::get_or_create(uint64_t id) {
  Shard& shard = shard_of(id);
  const std::lock_guard lock(shard.mutex);
  std::shared_ptr<ContextState>& entry = shard.contexts[id];
  if (!entry) entry = std::make_shared<ContextState>(id);
  return entry;
}

std::shared_ptr<ContextState> Contexts::take(uint64_t id) {
  Shard& shard = shard_of(id);
  const std::lock_guard lock(shard.mutex);
  const auto found = shard.contexts.find(id);
  if (found == shard.contexts.end()) return {};
  auto context = std::move(found->second);
  shard.contexts.erase(found);
  return context;
}

bool Contexts::close(uint64_t id, int said_by) {
  const auto context = take(id);
  if (!context) return false;
  context->released = true;
  std::map<uint64_t, base::Intrusive<autograd::Node>> sends, receives, differentiated;  // outside the lock
  std::set<int> known;
  std::shared_ptr<Run> run;
  {
    const std::lock_guard lock(context->mutex);
    run = std::move(context->run);
    sends.swap(context->sends);
    receives.swap(context->receives);
    differentiated.swap(context->differentiated);
    known = context->known;
  }
  // Workers that wait for this part of a backward must not wait for ever.
  if (run)
    run->fail(std::make_exception_ptr(
        RpcError(RpcErrorKind::kDeadContext, worker_,
                 concat("[dist_autograd] context ", id, " was released while its backward was under way"))));
  for (const int worker : known) {
    if (worker != worker_ && worker != said_by) courier_.send(worker, Notice{Notice::Kind::kCleanup, id, 0});
  }
  return true;
}

void Contexts::forget_worker(int worker) {
  std::vector<uint64_t> opened;
  for (const Shard& shard : shards_) {
    const std::lock_guard lock(shard.mutex);
    for (const auto& [id, context] : shard.contexts) {
      if (id >> 48 == static_cast<uint64_t>(worker)) opened.push_back(id);
    }
  }
  for (const uint64_t id : opened) close(id);
}

Contexts::Counts Contexts::counts() const {
  Counts counts;
  for (const Shard& shard : shards_) {
    const std::lock_guard lock(shard.mutex);
    counts.contexts += shard.contexts.size();
    for (const auto& [id, context] : shard.contexts) {
      const std::lock_guard inner(context->mutex);
      counts.backwards += context->run ? 1 : 0;
    }
  }
  return counts;
}

// ---- recording

Mark Contexts::sending(const std::vector<Tensor>& tensors, int to, bool forced) {
  if (of_thread.contexts != this || of_thread.id == 0) return {};
  const bool any =
      std::any_of(tensors.begin(), tensors.end(), [](const Tensor& x) { return requires_grad(differentiable(x)); });
  if (!any && !forced) return {};
  const auto context = find(of_thread.id);
  if (!context) return {};  // released meanwhile
  Mark mark{of_thread.id, 0};
  if (!any) {
    const std::lock_guard lock(context->mutex);
    context->known.insert(to);
    return mark;
  }
  autograd::NewNode node;
  for (const Tensor& x : tensors) {
    if (requires_grad(differentiable(x))) node.add_input(differentiable(x));
  }
  node.set_rule(std::make_unique<SendBackward>());
  for (const Tensor& x : tensors) {
    if (requires_grad(differentiable(x))) node.describe_output(op::spec_of(differentiable(x)));
  }
  mark.hop = static_cast<uint64_t>(worker_) << 48 | next_hop_.fetch_add(1);
  const std::lock_guard lock(context->mutex);
  context->known.insert(to);
  context->sends.emplace(mark.hop, node.node());
  context->is_loose = false;
  ++context->version;
  return mark;
}

void Contexts::received(const Mark& mark, int from, const std::vector<Tensor>& tensors) {
  if (mark.context == 0) return;
  const auto context = get_or_create(mark.context);
  if (mark.hop == 0) return;
  autograd::NewNode node;
  node.set_rule(std::make_unique<ReceiveBackward>(context, mark.hop, from));
  for (const Tensor& each : tensors) {
    const Tensor& x = differentiable(each);
    if (!requires_grad(x)) continue;
    set_requires_grad(x, false);
    node.add_output(x);
  }
  const std::lock_guard lock(context->mutex);
  context->receives.emplace(mark.hop, node.node());
  context->is_loose = true;
  ++context->version;
}

// ---- reports

namespace {
constexpr int kLooseBits = 16;
constexpr uint64_t kMostLoose = (uint64_t{1} << kLooseBits) - 1;
}  // namespace

void Contexts::asked(uint64_t id, int whom) {
  const auto context = find(id);
  if (!context) return;
  const std::lock_guard lock(context->mutex);
  ++context->called[whom].open;
  ++context->version;
}

uint64_t Contexts::report(uint64_t id, int to) {
  const auto context = id == 0 ? nullptr : find(id);
  if (!context) return 0;
  const std::lock_guard lock(context->mutex);
  uint64_t loose = context->is_loose ? 1 : 0;
  for (const auto& [worker, called] : context->called) {
    // The worker that opened the context takes part in any case.
    if (worker == to && static_cast<uint64_t>(worker) == id >> 48) continue;
    loose += static_cast<uint64_t>(called.open) + called.loose;
  }
  return (context->version + 1) << kLooseBits | std::min(loose, kMostLoose);
}

void Contexts::answered(uint64_t id, int by, uint64_t report) {
  const auto context = report == 0 ? nullptr : find(id);
  if (!context) return;
  const std::lock_guard lock(context->mutex);
  CalledWorker& called = context->called[by];
  --called.open;
  ++context->version;
  // Answers may overtake each other.
  if (report >> kLooseBits < called.version) return;
  called.version = report >> kLooseBits;
  called.loose = report & kMostLoose;
}

bool Contexts::is_accounted(const ContextState& context) const {
  return context.id >> 48 == static_cast<uint64_t>(worker_) &&
         std::all_of(context.called.begin(), context.called.end(),
                     [](const auto& entry) { return entry.second.open == 0 && entry.second.loose == 0; });
}

}  // namespace chorale::dist_autograd
