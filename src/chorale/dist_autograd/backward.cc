// Backward of a context: what the caller does, and what a worker does that gradients, marks and notices come to.
#include <utility>

#include "chorale/base/rpc_error.h"
#include "chorale/dist_autograd/run.h"
#include "chorale/trace/trace.h"

namespace chorale::dist_autograd {
namespace {

void check_roots(const std::vector<Tensor>& roots) {
  CHORALE_CHECK(!roots.empty(), "[dist_autograd] backward needs at least one root");
  for (const Tensor& root : roots) {
    CHORALE_CHECK(root.defined(), "[dist_autograd] a root is undefined");
    CHORALE_CHECK_STATE(requires_grad(root), "[dist_autograd] a root of shape ", root.sizes(),
                        " does not require a gradient");
    CHORALE_CHECK(root.elems() == 1, "[dist_autograd] a root must have one element, not shape ", root.sizes());
    CHORALE_CHECK_STATE(!is_leaf(root), "[dist_autograd] a root has no history: it is a leaf");
  }
}

std::exception_ptr failure(RpcErrorKind kind, int worker, const std::string& text) {
  return std::make_exception_ptr(RpcError(kind, worker, text));
}

}  // namespace

void Contexts::backward(uint64_t id, const std::vector<Tensor>& roots, bool retain_graph) {
  const auto context = get(id);
  check_roots(roots);
  const trace::Span span("dist_autograd:backward");
  const uint64_t number = static_cast<uint64_t>(worker_) << 48 | next_run_.fetch_add(1);
  const std::shared_ptr<Latch> latch = courier_.make_latch();
  const auto error = std::make_shared<std::exception_ptr>();
  std::shared_ptr<Run> run;
  bool must_mark = false;
  {
    const std::lock_guard lock(context->mutex);
    CHORALE_CHECK_STATE(!context->run, "[dist_autograd] a backward of context ", id, " is under way on worker ",
                        worker_, " already");
    const bool accounted = mode_ == Mode::kSmart && is_accounted(*context);
    must_mark = mode_ == Mode::kSmart && !accounted;
    run =
        std::make_shared<Run>(*this, context, RunOptions{number, retain_graph, accounted},
                              [latch, error](const std::vector<ReturnedGradients>&, const std::exception_ptr& failed) {
                                *error = failed;
                                latch->open();
                              });
    run->expect_sends();
    for (const Tensor& root : roots) run->add_root(root);
    context->run = run;
    if (must_mark) context->marking = {.run = number};
  }
  if (must_mark) {
    std::vector<autograd::Node*> from;
    from.reserve(roots.size());
    for (const Tensor& root : roots) from.push_back(autograd::edge_of(root).node.get());
    mark(context, number, std::move(from),
         [this, context, run](const std::vector<int>& workers, const std::exception_ptr& failed) {
           if (failed) return run->fail(failed);
           settle(context, run->number());
           for (const int worker : workers) {
             if (worker != worker_) courier_.send(worker, Notice{Notice::Kind::kSettle, context->id, run->number()});
           }
         });
  }
  run->drive();
  latch->wait(Deadline::never());
  if (!*error) return;
  abort(context, number);
  std::rethrow_exception(*error);
}

// ---- what comes from other workers

void Contexts::came(int from, const Gradients& gradients, const Courier::Done& answer) {
  std::shared_ptr<Run> run, stale;
  bool first = false, is_over = false;
  try {
    const auto context = get(gradients.context);
    {
      const std::lock_guard lock(context->mutex);
      if (context->released)
        throw RpcError(RpcErrorKind::kDeadContext, worker_,
                       concat("[dist_autograd] context ", context->id, " has just been released"));
      if (gradients.run <= context->aborted && gradients.run >> 48 == context->aborted >> 48)
        throw StateError("[dist_autograd] this backward has failed");
      run = context->run;
      if (run && run->number() != gradients.run) {
        // An earlier backward of the same worker has failed, and nobody has told us yet.
        CHORALE_CHECK_STATE(run->number() >> 48 == gradients.run >> 48 && run->number() < gradients.run,
                            "[dist_autograd] two backwards of context ", context->id, " meet on worker ", worker_,
                            "; one at a time");
        stale = std::exchange(run, nullptr);
        context->run.reset();
      }
      is_over = !run && gradients.hop == 0 && context->ended == gradients.run;
      if (gradients.hop != 0 && !context->sends.contains(gradients.hop))
        throw RpcError(RpcErrorKind::kUnknownContext, worker_,
                       concat("[dist_autograd] context ", context->id, " of worker ", worker_, " has no hop ",
                              gradients.hop, ": it was differentiated before without retain_graph, or has ended"));
      if (!run && !is_over) {
        first = true;
        run = std::make_shared<Run>(
            *this, context, RunOptions{gradients.run, gradients.retain_graph, gradients.accounted, from}, answer);
        run->expect_sends();
        context->run = run;
      }
    }
    if (stale) stale->fail(failure(RpcErrorKind::kRemote, worker_, "[dist_autograd] another backward has begun"));
    // This part has ended without the hops that get no gradients: they were differentiated before.
    if (is_over) return answer({}, nullptr);
    if (gradients.hop != 0) run->deliver(gradients.hop, gradients.tensors);
    run->withdraw(gradients.absent);
  } catch (const std::exception&) {
    const auto error = std::current_exception();
    if (first) {
      run->fail(error);
    } else {
      answer({}, error);
    }
    return;
  }
  if (!first) answer({}, nullptr);
  run->drive();
}

// Follows the graph from some nodes to receive nodes that are not marked yet, and marks their hops where they began.
void Contexts::mark(const std::shared_ptr<ContextState>& context, uint64_t run, std::vector<autograd::Node*> from,
                    const Courier::Marked& done) {
  std::map<int, std::vector<uint64_t>> hops;  // by worker
  {
    const std::vector<const ReceiveBackward*> found = receives_behind(std::move(from));
    const std::lock_guard lock(context->mutex);
    for (const ReceiveBackward* receive : found) {
      if (context->marking.run == run && context->marking.receives.insert(receive->hop).second)
        hops[receive->from].push_back(receive->hop);
    }
  }
  struct Onward {
    std::mutex mutex;
    size_t left;
    std::set<int> workers;
    std::exception_ptr error;
  };
  auto onward = std::make_shared<Onward>();
  onward->left = hops.size();
  onward->workers.insert(worker_);
  if (hops.empty()) return done({worker_}, nullptr);
  for (auto& [worker, list] : hops) {
    courier_.send(worker, Marks{context->id, run, std::move(list)},
                  [onward, done](const std::vector<int>& workers, const std::exception_ptr& error) {
                    {
                      const std::lock_guard lock(onward->mutex);
                      onward->workers.insert(workers.begin(), workers.end());
                      if (error && !onward->error) onward->error = error;
                      if (--onward->left > 0) return;
                    }
                    done({onward->workers.begin(), onward->workers.end()}, onward->error);
                  });
  }
}

void Contexts::came(const Marks& marks, const Courier::Marked& answer) {
  std::shared_ptr<ContextState> context;
  std::vector<autograd::Node*> from;
  std::vector<base::Intrusive<autograd::Node>> kept;
  try {
    context = get(marks.context);
    const std::lock_guard lock(context->mutex);
    Marking& marking = context->marking;
    if (marking.run != marks.run) {
      // Marks of a backward that has failed may come when the next one has begun.
      CHORALE_CHECK_STATE(marking.run >> 48 != marks.run >> 48 || marking.run < marks.run,
                          "[dist_autograd] another backward has begun");
      marking = {.run = marks.run};
    }
    for (const uint64_t hop : marks.hops) {
      if (!marking.sends.insert(hop).second) continue;
      auto found = context->sends.find(hop);
      if (found == context->sends.end()) {  // its gradients have come already, and this worker is done with them
        found = context->differentiated.find(hop);
        if (found == context->differentiated.end()) continue;
      }
      kept.push_back(found->second);
      from.push_back(found->second.get());
    }
  } catch (const std::exception&) {
    return answer({}, std::current_exception());
  }
  mark(context, marks.run, std::move(from), answer);
}

void Contexts::settle(const std::shared_ptr<ContextState>& context, uint64_t run) {
  std::shared_ptr<Run> here;
  std::set<uint64_t> marked;
  {
    const std::lock_guard lock(context->mutex);
    if (context->marking.run != run) return;  // of an earlier backward
    context->marking.settled = true;
    marked = context->marking.sends;
    if (context->run && context->run->number() == run) here = context->run;
  }
  if (!here) return;
  here->withdraw_others(marked);
  here->drive();
}

void Contexts::abort(const std::shared_ptr<ContextState>& context, uint64_t run) {
  std::set<int> known;
  std::shared_ptr<Run> here;
  {
    const std::lock_guard lock(context->mutex);
    if (context->aborted >= run && context->aborted >> 48 == run >> 48) return;
    context->aborted = run;
    known = context->known;
    if (context->run && context->run->number() == run) here = context->run;
  }
  if (here) here->fail(failure(RpcErrorKind::kRemote, worker_, "[dist_autograd] the backward has failed elsewhere"));
  for (const int worker : known) {
    if (worker != worker_) courier_.send(worker, Notice{Notice::Kind::kAbort, context->id, run});
  }
}

void Contexts::fail_backwards(const std::exception_ptr& error) {
  for (const auto& context : all()) {
    std::shared_ptr<Run> run;
    {
      const std::lock_guard lock(context->mutex);
      run = context->run;
    }
    if (run) run->fail(error);
  }
}

void Contexts::came(int from, const Notice& notice) {
  if (notice.kind == Notice::Kind::kCleanup && !notice.here_only) {
    close(notice.context, from);
    return;
  }
  const auto context = find(notice.context);
  if (!context) return;
  if (notice.kind == Notice::Kind::kCleanup) return lose_caller(*context, from);
  if (notice.kind == Notice::Kind::kSettle) {
    settle(context, notice.run);
  } else {
    abort(context, notice.run);
  }
}

}  // namespace chorale::dist_autograd
