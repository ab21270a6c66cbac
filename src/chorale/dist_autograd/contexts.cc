#include "chorale/dist_autograd/contexts.h"

#include <algorithm>

#include "chorale/autograd/new_node.h"
#include "chorale/base/rpc_error.h"
#include "chorale/dist_autograd/context.h"
#include "chorale/dist_autograd/run.h"
#include "chorale/trace/trace.h"

namespace chorale::dist_autograd {
namespace {

constexpr uint64_t kNumbers = (uint64_t{1} << 48) - 1;  // of an id, without its worker

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
  Shard& shard = shard_of(id);
  const std::lock_guard lock(shard.mutex);
  shard.contexts.emplace(id, std::make_shared<ContextState>(id));
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

std::shared_ptr<ContextState> Contexts::get_or_begin(uint64_t id) {
  const int opener = static_cast<int>(id >> 48);
  if (opener == worker_) return find(id);  // open() begins those
  {
    const std::lock_guard lock(gone_mutex_);
    const auto gone = gone_.find(opener);
    if (gone != gone_.end() && (id & kNumbers) <= gone->second) return {};
  }
  Shard& shard = shard_of(id);
  const std::lock_guard lock(shard.mutex);
  if (shard.ending.contains(id)) return {};
  std::shared_ptr<ContextState>& entry = shard.contexts[id];
  if (!entry) entry = std::make_shared<ContextState>(id);
  return entry;
}

std::vector<std::shared_ptr<ContextState>> Contexts::all() const {
  std::vector<std::shared_ptr<ContextState>> all;
  for (const Shard& shard : shards_) {
    const std::lock_guard lock(shard.mutex);
    for (const auto& [id, context] : shard.contexts) all.push_back(context);
  }
  return all;
}

bool Contexts::close(uint64_t id, int said_by) { return end(id, said_by, false); }

bool Contexts::end(uint64_t id, int said_by, bool here_only) {
  const auto context = find(id);
  if (!context) return false;
  std::map<uint64_t, base::Intrusive<autograd::Node>> sends, receives, differentiated;  // outside the lock
  std::set<int> told;
  std::shared_ptr<Run> run;
  {
    const std::lock_guard lock(context->mutex);
    if (context->released.exchange(true)) return false;
    run = std::move(context->run);
    sends.swap(context->sends);
    receives.swap(context->receives);
    differentiated.swap(context->differentiated);
    told = context->known;
    told.erase(worker_);
    told.erase(said_by);
    std::map<int, int64_t> in_flight;
    for (const auto& [worker, called] : context->called) {
      if (called.in_flight == 0) continue;
      in_flight.emplace(worker, called.in_flight);
      told.erase(worker);
    }
    Shard& shard = shard_of(id);
    const std::lock_guard inner(shard.mutex);
    shard.contexts.erase(id);
    if (!in_flight.empty()) shard.ending.emplace(id, Shard::Ending{std::move(in_flight), here_only});
  }
  // Workers that wait for this part of a backward must not wait for ever.
  if (run)
    run->fail(std::make_exception_ptr(
        RpcError(RpcErrorKind::kDeadContext, worker_,
                 concat("[dist_autograd] context ", id, " was released while its backward was under way"))));
  for (const int worker : told) courier_.send(worker, Notice{Notice::Kind::kCleanup, id, 0, here_only});
  return true;
}

void Contexts::forget_worker(int worker, uint64_t last) {
  {
    const std::lock_guard lock(gone_mutex_);
    uint64_t& gone = gone_[worker];
    gone = std::max(gone, last);
  }
  for (const auto& context : all()) {
    if (context->id >> 48 != static_cast<uint64_t>(worker)) {
      lose_caller(*context, worker);
    } else if ((context->id & kNumbers) <= last) {
      close(context->id);
    }
  }
}

void Contexts::lose_caller(ContextState& context, int worker) {
  {
    const std::lock_guard lock(context.mutex);
    if (context.callers.erase(worker) == 0 || !context.callers.empty()) return;
  }
  if (context.id >> 48 != static_cast<uint64_t>(worker_)) end(context.id, worker, true);
}

Contexts::Counts Contexts::counts() const {
  Counts counts;
  for (const auto& context : all()) {
    const std::lock_guard lock(context->mutex);
    ++counts.contexts;
    counts.backwards += context->run ? 1 : 0;
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

void Contexts::received(const Mark& mark, int from, const std::vector<Tensor>& tensors, Came as) {
  if (mark.context == 0) return;
  const auto context = as == Came::kRequest ? get_or_begin(mark.context) : find(mark.context);
  if (context && as == Came::kRequest) {
    const std::lock_guard lock(context->mutex);
    context->callers.insert(from);
  }
  if (mark.hop == 0) return;
  autograd::NewNode node;
  node.set_rule(std::make_unique<ReceiveBackward>(context, mark.hop, from));
  for (const Tensor& each : tensors) {
    const Tensor& x = differentiable(each);
    if (!requires_grad(x)) continue;
    set_requires_grad(x, false);
    node.add_output(x);
  }
  if (!context) return;  // backward to them says that it has ended
  const std::lock_guard lock(context->mutex);
  if (context->released) return;
  context->receives.emplace(mark.hop, node.node());
  context->is_loose = true;
  ++context->version;
}

// ---- reports

namespace {
constexpr int kLooseBits = 16;
constexpr uint64_t kMostLoose = (uint64_t{1} << kLooseBits) - 1;
}  // namespace

bool Contexts::asked(uint64_t id, int whom) {
  const auto context = find(id);
  if (!context) return false;
  const std::lock_guard lock(context->mutex);
  if (context->released) return false;
  CalledWorker& called = context->called[whom];
  ++called.in_flight;
  ++called.open;
  ++context->version;
  return true;
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
  if (const auto context = find(id)) {
    const std::lock_guard lock(context->mutex);
    if (!context->released) {
      CalledWorker& called = context->called[by];
      --called.in_flight;
      if (report == 0) return;
      --called.open;
      ++context->version;
      // Answers may overtake each other.
      if (report >> kLooseBits < called.version) return;
      called.version = report >> kLooseBits;
      called.loose = report & kMostLoose;
      return;
    }
  }
  bool here_only = false;
  {
    Shard& shard = shard_of(id);
    const std::lock_guard lock(shard.mutex);
    const auto ending = shard.ending.find(id);
    if (ending == shard.ending.end()) return;
    auto& [in_flight, only] = ending->second;
    const auto called = in_flight.find(by);
    if (called == in_flight.end() || --called->second > 0) return;
    here_only = only;
    in_flight.erase(called);
    if (in_flight.empty()) shard.ending.erase(ending);
  }
  if (by != worker_) courier_.send(by, Notice{Notice::Kind::kCleanup, id, 0, here_only});
}

bool Contexts::is_accounted(const ContextState& context) const {
  return context.id >> 48 == static_cast<uint64_t>(worker_) &&
         std::all_of(context.called.begin(), context.called.end(),
                     [](const auto& entry) { return entry.second.open == 0 && entry.second.loose == 0; });
}

}  // namespace chorale::dist_autograd
