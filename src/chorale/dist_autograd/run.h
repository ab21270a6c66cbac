// Inside distributed autograd: one worker's part of a backward.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "chorale/autograd/node.h"
#include "chorale/dist_autograd/contexts.h"

namespace chorale::dist_autograd {

// Where tensors came in from another worker: their gradients go back there.
struct ReceiveBackward final : autograd::CustomBackward {
  ReceiveBackward(std::weak_ptr<ContextState> whose, uint64_t number, int origin)
      : context(std::move(whose)), hop(number), from(origin) {}
  const char* name() const override { return "receive"; }
  Tensors apply(autograd::Node& node, std::span<const Tensor> dout, op::InputSet needed) override;
  bool always_runs() const override { return true; }

  const std::weak_ptr<ContextState> context;
  const uint64_t hop;
  const int from;
};

// Where the gradients of a run go: into the context, each in memory of its own. One that others see, too, is copied and
// kept until the end of the run: the last leaf that it goes to would look like its only holder otherwise, and get
// memory that the rule that made it has given to others as well.
class RunGradients final : public autograd::GradSink {
 public:
  explicit RunGradients(autograd::GradientMap& context) : context_(context) {}
  void accept(const Tensor& leaf, Tensor gradient, autograd::Arrival arrival) override;
  Tensor gradient(const Tensor& leaf) override { return context_.gradient(leaf); }
  void set_gradient(const Tensor& leaf, const Tensor& gradient) override { context_.set_gradient(leaf, gradient); }
  // The run has ended.
  void let_go();

 private:
  autograd::GradientMap& context_;
  std::mutex mutex_;
  std::vector<Tensor> shared_;
};

// The receive nodes that these nodes lead to.
std::vector<const ReceiveBackward*> receives_behind(std::vector<autograd::Node*> from);

struct RunOptions {
  uint64_t number = 0;
  bool retain_graph = false;
  bool accounted = false;  // Note [Smart backward]
  int starter = -1;        // the worker that is told of the end; -1: none
};

class Run : public std::enable_shared_from_this<Run> {
 public:
  // `at_end` is called once.
  Run(Contexts& contexts, std::shared_ptr<ContextState> context, const RunOptions& options, Courier::Done at_end);

  uint64_t number() const { return options_.number; }
  // Called with the lock of the context: expects the gradients of its send nodes.
  void expect_sends();
  void add_root(const Tensor& root);
  // The gradients of a hop. Throws when they are not expected.
  void deliver(uint64_t hop, const std::vector<Tensor>& gradients);
  // These hops get none. Those that are not expected are no news.
  void withdraw(const std::vector<uint64_t>& hops);
  // Expects those of the marked hops only.
  void withdraw_others(const std::set<uint64_t>& marked);
  // Goes on as far as it can. One thread drives it at a time; what others bring meanwhile is seen by that one.
  void drive();
  void fail(const std::exception_ptr& error);
  // Receive nodes call it, inside drive().
  void send_back(const ReceiveBackward& receive, std::vector<Tensor> gradients);
  static Run* current();

 private:
  // One that was counted as outstanding.
  void send(int to, Gradients gradients);
  // drive() calls it: says of which hops it is known by now that they get no gradients.
  void tell_absent();
  // The gradients for the starter are not left to the answer: it must come later.
  void send_kept();
  void end_if_done();
  bool is_done() const {  // with the lock
    return error_ || (graph_done_ && outstanding_ == 0 && !must_look_ && !looks_);
  }

  Contexts& contexts_;
  const std::shared_ptr<ContextState> context_;
  const RunOptions options_;
  RunGradients gradients_;
  autograd::BackwardRun run_;
  std::atomic<int64_t> news_{0};
  std::set<uint64_t> told_;  // in drive(): receive nodes whose hops get no gradients

  std::mutex mutex_;
  std::map<uint64_t, autograd::LateRoot> expected_;
  std::set<uint64_t> came_;
  struct Start {
    uint64_t hop;  // 0: a root
    base::Intrusive<autograd::Node> node;
  };
  std::vector<Start> starts_;            // what may lead to receive nodes
  bool must_look_, looks_ = false;       // which receive nodes these do not lead to
  int64_t outstanding_ = 0;              // gradients that were sent and not answered
  std::vector<ReturnedGradients> kept_;  // for the starter
  bool graph_done_ = false, ended_ = false;
  std::exception_ptr error_;
  Courier::Done at_end_;
};

}  // namespace chorale::dist_autograd
