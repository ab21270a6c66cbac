// One backward pass. It counts what each node waits for, runs ready nodes from the highest number to the lowest, and
// hands the gradients of leaves to a sink as soon as they are complete. Iterative; any thread may drive it; the order
// depends on the graph alone, so the bits do too.
#pragma once

#include <functional>
#include <vector>

#include "chorale/autograd/node.h"
#include "chorale/base/pointer_map.h"

namespace chorale::autograd {

// Takes the gradients of leaves. The default one accumulates into the leaf's own gradient.
class GradSink {
 public:
  virtual ~GradSink() = default;
  virtual void accept(const Tensor& leaf, Tensor gradient, bool create_graph) = 0;
  // Where the gradient should be written if it is made by one op; undefined: anywhere.
  virtual Tensor destination(const Tensor& leaf) = 0;
};
GradSink& grad_field_sink();

struct BackwardOptions {
  bool retain_graph = false;  // keep saved values, so that the graph can be differentiated again
  bool create_graph = false;  // record the gradients' own computation
  GradSink* sink = nullptr;   // null: the leaves' own gradients
};

class BackwardRun {
 public:
  explicit BackwardRun(BackwardOptions options) : options_(options) {}

  // Adds a root with its gradient; allowed while run() is in progress (from a hook) and between calls of run().
  void add_root(const Tensor& root, Tensor gradient);
  // Asks for the gradient of `input`, a leaf or not, instead of accumulating; before the first root. Once something is
  // captured, nothing goes to the sink and only nodes that lead to a captured input run.
  void capture(const Tensor& input);
  void run();
  // Undefined where no gradient arrived.
  Tensor captured(size_t i) const { return captures_[i].gradient; }
  bool is_capturing() const { return !captures_.empty(); }
  // Runs once when run() has nothing left to do.
  void at_end(std::function<void()> callback) { callbacks_.push_back(std::move(callback)); }

  // The innermost one that this thread is driving, or null.
  static BackwardRun* current();

 private:
  // A node, or a leaf, that waits for gradients.
  struct Task {
    Node* node = nullptr;
    TensorImpl* leaf = nullptr;
    uint32_t waiting = 0;  // nodes that have not sent their gradient yet
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
  struct RuleContext;

  void run_tasks();
  uint32_t task_of(const Edge& edge);
  void discover(uint32_t root);
  void mark_needed();
  void receive(Task& task, uint32_t index, Tensor gradient);
  void make_ready(uint32_t task);
  bool add_to_part(const Node& node, const Tensor& dout);
  void run_node(uint32_t task);
  void run_leaf(uint32_t task);
  Tensors apply_rule(Node& node, std::span<const Tensor> dout, uint32_t needed);
  void fit(Node& node, const Edge& edge, Tensor& gradient) const;
  bool sole_contribution(const Edge& edge) const;

  BackwardOptions options_;
  std::vector<Task> tasks_;
  PointerMap task_by_target_;    // a node or a leaf
  std::vector<Ready> ready_;     // a heap
  std::vector<uint32_t> roots_;  // not yet made ready
  std::vector<Edge> kept_;       // the roots' edges keep the graph alive
  std::vector<Capture> captures_;
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace chorale::autograd
