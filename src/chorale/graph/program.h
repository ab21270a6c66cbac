// A graph made ready to run: kernels in order, with operands whose addresses are fixed but for inputs and outputs. A
// run costs little more than the kernels.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "chorale/graph/plan.h"

namespace chorale::graph {

// What runs a fused node: operands are those of the node, in order.
using FusedKernel = std::function<void(std::span<const Tensor> in, std::span<Tensor> out)>;
using FusedKernels = std::function<FusedKernel(const Node& node)>;

class Program {
 public:
  // Makes the program of the same graph at other sizes, without compiling anything.
  using Resize = std::function<std::shared_ptr<const Program>(Graph)>;
  // `fused` finds the kernel of a fused node; without it such a node runs its rows one by one. `resize`: of a backend
  // whose kernels hold for every size; without it other sizes run the rows one by one.
  explicit Program(Graph graph, const FusedKernels& fused = {}, Resize resize = {});
  ~Program();

  const Graph& graph() const { return graph_; }
  const Plan& plan() const { return plan_; }
  std::shared_ptr<const Program> at_other_sizes(Graph graph) const;
  // What its kernels were made by, where they are not those of the ops: two programs of one graph and one maker give
  // the same bits.
  const std::string& maker() const { return maker_; }
  void set_maker(std::string maker) { maker_ = std::move(maker); }
  // Kernels of one run, copies included.
  size_t kernels() const { return kernels_; }

  // One tensor per input, with the layout that the graph says. Sets one tensor per output that is new; those that an
  // input is overwritten with stay undefined. An output that is given has the graph's layout and is written into:
  // nobody else may see its memory. Several threads may run it at a time.
  void run(std::span<const Tensor> in, std::span<Generator* const> generators, std::span<Tensor> out) const;
  // Gives back the memory that it keeps between runs; the next one takes it anew.
  void release() const;

 private:
  struct Instance;
  std::unique_ptr<Instance> make() const;
  std::unique_ptr<Instance> take_idle() const;
  static void run_steps(Instance& instance, std::span<Generator* const> generators);
  void make_kernels(Instance& instance) const;

  Graph graph_;
  std::vector<Device> devices_;  // of its values
  Plan plan_;
  FusedKernels fused_;
  Resize resize_;
  std::string maker_;
  size_t kernels_ = 0;
  std::vector<bool> is_in_order_;  // by output
  mutable std::once_flag kernels_made_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Instance>> idle_;
};

}  // namespace chorale::graph
