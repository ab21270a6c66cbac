// One backward pass. It counts what each node waits for, runs ready nodes from the highest number to the lowest, and
// hands the gradients of leaves to a sink as soon as they are complete. Iterative; any thread may drive it; the order
// depends on the graph alone, so the bits do too. Only roots that come while it runs (Note [Late roots]) are added in
// the order in which they come.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "chorale/autograd/grad_sink.h"
#include "chorale/autograd/late_root.h"
#include "chorale/base/pointer_map.h"

namespace chorale::autograd {

struct BackwardOptions {
  bool retain_graph = false;              // keep saved values, so that the graph can be differentiated again
  bool create_graph = false;              // record the gradients' own computation
  GradSink* sink = nullptr;               // null: the leaves' own gradients
  Deadline deadline = Deadline::never();  // for roots that come later
};

class BackwardRun {
 public:
  explicit BackwardRun(BackwardOptions options);
  ~BackwardRun();
  BackwardRun(const BackwardRun&) = delete;
  BackwardRun& operator=(const BackwardRun&) = delete;

  // Adds a root with its gradient; allowed while run() is in progress (from a hook) and between calls of run().
  void add_root(const Tensor& root, Tensor gradient);
  void add_root(const Edge& edge, Tensor gradient);
  // Note [Late roots]. Named, or not known yet; called by the thread that drives the run. A part of the graph that two
  // roots share must not have run when the second one comes: name it if that can happen.
  [[nodiscard]] LateRoot expect_root(const Edge& root);
  [[nodiscard]] LateRoot expect_root();
  // Asks for the gradient of `input`, a leaf or not, instead of accumulating; before the first root. Once something is
  // captured, nothing goes to the sink and only nodes that lead to a captured input run.
  void capture(const Tensor& input);
  void run();
  // Undefined where no gradient arrived.
  Tensor captured(size_t i) const { return captures_[i].gradient; }
  bool is_capturing() const { return !captures_.empty(); }
  GradSink& sink() const { return options_.sink ? *options_.sink : grad_field_sink(); }
  // Runs once when run() has nothing left to do and nothing to wait for.
  void at_end(std::function<void()> callback) { callbacks_.push_back(std::move(callback)); }

  // The innermost one that this thread is driving, or null.
  static BackwardRun* current();

 private:
  // A node, or a leaf, that waits for gradients.
  struct Task {
    Node* node = nullptr;
    Tensor::Impl* leaf = nullptr;
    uint32_t waiting = 0;  // nodes that have not sent their gradient yet, and roots that have not come
    bool needed = true;    // its gradient is wanted
    bool runs = true;      // something behind it wants a gradient
    bool done = false;
    SmallVector<Tensor, 1> gradients;  // by output
  };
  struct Capture {
    Edge edge;
    Tensor gradient;
  };
  struct Ready {
    uint64_t number;
    uint32_t task;
    bool operator<(const Ready& other) const { return number < other.number; }
  };
  class RuleContext;

  void run_tasks();
  uint32_t task_of(const Edge& edge);
  uint32_t task_of_root(const Edge& edge);
  void discover(uint32_t root);
  void mark_needed();
  void take_late_roots();
  bool wait_for_late_root();
  std::string names_of_late_roots() const;
  bool owns(const Tensor& x) const;
  void add_up(Tensor& sum, Tensor gradient) const;
  void receive(Task& task, uint32_t index, Tensor gradient);
  void make_ready(uint32_t task);
  bool add_to_part(const Node& node, const Tensor& dout);
  void run_node(uint32_t task);
  void run_leaf(uint32_t task);
  Tensors apply_rule(Node& node, std::span<const Tensor> dout, op::InputSet needed);
  void fit(Node& node, const Edge& edge, Tensor& gradient) const;
  bool sole_contribution(const Edge& edge) const;

  BackwardOptions options_;
  // Whether it may look at reference counts, and write again what nobody else sees: neither when a graph is recorded.
  const bool reuses_memory_;
  std::vector<Task> tasks_;
  base::PointerMap task_by_target_;  // a node or a leaf
  std::vector<Ready> ready_;         // a heap
  std::vector<uint32_t> roots_;      // not yet made ready
  std::vector<uint32_t> late_;       // roots that were named and have not come
  std::vector<Edge> kept_;           // the roots' edges keep the graph alive
  std::vector<Capture> captures_;
  std::vector<std::function<void()>> callbacks_;
  std::shared_ptr<BackwardInbox> inbox_;  // where other threads put late roots; null when none was ever expected
};

// Where gradients go in the backward that this thread is in; outside of one, the leaves' own.
GradSink& current_sink();

// The hooks of after_complete().
void run_completed_hooks(const Slot& slot, const Tensor& leaf, GradSink& sink);

}  // namespace chorale::autograd
