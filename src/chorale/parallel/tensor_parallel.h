// Tensor parallel training: the weights of layers are split over the ranks of one dimension of a mesh, and ranks
// compute parts of every layer together.
//
//   const Mesh mesh(world, {2, 4}, {"dp", "tp"});
//   tensor_parallel(model, mesh["tp"], {{"layers.*.up", Colwise{}}, {"layers.*.down", Rowwise{}}});
//
// Paths are patterns, level by level: "*", "?" and "[1-2]" as a shell knows them; "" is the module itself. A parameter
// keeps its object (optimizers and tied weights stay right) and its requires_grad; it becomes a sharded tensor.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chorale/kernel/nn_attrs.h"
#include "chorale/nn/module.h"
#include "chorale/sharding/sharded.h"

namespace chorale::parallel {

// What is done to a module, and around its call.
class Style {
 public:
  virtual ~Style() = default;
  virtual void apply(nn::Module& module, const Mesh& mesh, std::optional<int> source) const = 0;
};

// A Linear's outputs are split: its weight by rows (PyTorch's and ours is [out, in]), its bias too. An Embedding's
// columns are. Megatron's first half.
struct Colwise final : Style {
  Placement input = replicate();  // what the input is, if it is no sharded tensor; it is made whole
  Placement output = shard(-1);   // what the result becomes
  bool use_local_output = true;   // and whether it leaves as this rank's part
  // The dimension of `weight` that is the output, and into how many pieces that is cut first (3 for queries, keys and
  // values in one; the result is then a sharded tensor). By default what the module says (nn/weight_layout.h).
  std::optional<int64_t> output_dim{};
  int64_t pieces = 1;
  // The gradient of the input is reduced here; otherwise by what made it, once for all layers that read it
  // (Replicated::reduces_gradient).
  bool reduces_gradient = true;

  Colwise() = default;
  Colwise share_gradient() const;
  Colwise with_input(Placement p) const;
  Colwise with_output(Placement p) const;
  Colwise keep_sharded() const;
  Colwise with_weight(int64_t out_dim, int64_t cut_into = 1) const;
  void apply(nn::Module& module, const Mesh& mesh, std::optional<int> source) const override;
};

// A Linear's inputs are split: its weight by columns; the bias is whole. An Embedding's rows are, which takes whole
// indices: with_input(replicate()). Megatron's second half.
struct Rowwise final : Style {
  Placement input = shard(-1);
  Placement output = replicate();
  bool use_local_output = true;
  std::optional<int64_t> output_dim{};

  Rowwise() = default;
  Rowwise with_input(Placement p) const;
  Rowwise with_output(Placement p) const;
  Rowwise keep_sharded() const;
  Rowwise with_weight(int64_t out_dim) const;
  void apply(nn::Module& module, const Mesh& mesh, std::optional<int> source) const override;
};

// LayerNorm, RMSNorm, Dropout on inputs that are split along a dimension. Parameters are whole and taken to be equal on
// all ranks: nothing is sent. Their gradients are partial sums; optimizers reduce them once.
struct SequenceParallel final : Style {
  int64_t dim = 1;
  bool use_local_output = false;

  SequenceParallel() = default;
  explicit SequenceParallel(int64_t along, bool local = false) : dim(along), use_local_output(local) {}
  void apply(nn::Module& module, const Mesh& mesh, std::optional<int> source) const override;
};

// Parameters and buffers become copies that all ranks have, as sharded tensors; inputs that are whole are taken for
// copies, too.
struct Replicated final : Style {
  bool use_local_output = false;
  bool reduces_gradient = false;  // that of the result, where several layers read it

  Replicated() = default;
  Replicated reduce_gradient() const;
  void apply(nn::Module& module, const Mesh& mesh, std::optional<int> source) const override;
};

// Works before the call: tensors among the arguments, in order, are taken to be `declared` where they are not sharded,
// and become `desired`. None: left alone.
struct PrepareInput final : Style {
  std::vector<std::optional<Placement>> declared, desired;
  bool use_local_output = false;
  // Tensors have names where the module takes a struct that lists them (CHORALE_TENSORS); those not named are left
  // alone.
  //   PrepareInput({{"mask", shard(0), replicate()}})
  struct Field {
    std::string name;
    Placement declared, desired;
  };
  std::vector<Field> fields;

  PrepareInput(std::vector<std::optional<Placement>> from, std::vector<std::optional<Placement>> to,
               bool local = false);
  explicit PrepareInput(std::vector<Field> by_name, bool local = false);
  void apply(nn::Module& module, const Mesh& mesh, std::optional<int> source) const override;
};
// Works after the call, in the same way on results.
struct PrepareOutput final : Style {
  std::vector<std::optional<Placement>> declared, desired;
  bool use_local_output = true;

  PrepareOutput(std::vector<std::optional<Placement>> from, std::vector<std::optional<Placement>> to,
                bool local = true);
  void apply(nn::Module& module, const Mesh& mesh, std::optional<int> source) const override;
};
struct PrepareInputOutput final : Style {
  PrepareInput before;
  PrepareOutput after;

  PrepareInputOutput(PrepareInput in, PrepareOutput out) : before(std::move(in)), after(std::move(out)) {}
  void apply(nn::Module& module, const Mesh& mesh, std::optional<int> source) const override;
};

struct PlanEntry {
  template <class S>
  requires std::is_base_of_v<Style, S> PlanEntry(std::string where, S what)
      : path(std::move(where)), style(std::make_shared<S>(std::move(what))) {}
  std::string path;
  std::shared_ptr<const Style> style;
};
using Plan = std::vector<PlanEntry>;

// Applies styles to the modules that the patterns name, over a mesh of one dimension. `source`: the rank of it whose
// parameters count (none: every rank's own, nothing is sent). A pattern that names no module is warned of.
void tensor_parallel(nn::Module& module, const Mesh& mesh, const Plan& plan, std::optional<int> source = 0);
// Takes the mesh of the innermost comm::MeshScope (comm/mesh_scope.h).
void tensor_parallel(nn::Module& module, const Plan& plan, std::optional<int> source = 0);

// Which placements a parameter or buffer of that name gets.
using Partition = std::function<Placements(const std::string& name, const Tensor& value)>;
// Makes every parameter and buffer of a module a sharded tensor; without `partition`, a copy on every rank. StateError
// when one is sharded already.
void distribute_module(nn::Module& module, const Mesh& mesh, const Partition& partition = {},
                       std::optional<int> source = 0);

// Cross entropy of logits that are split along the classes (dimension 1; [batch, classes, …]), without gathering them:
// three all-reduces of a number per sample in forward, none in backward. Targets are whole or copies, i64; so is the
// weight per class. The result is a copy. InvalidArgument where the logits are split otherwise.
struct LossParallelOptions {
  Tensor weight{};
  Reduction reduction = Reduction::kMean;
  int64_t ignore_index = -100;
};
Tensor loss_parallel(const Tensor& logits, const Tensor& target, const LossParallelOptions& options = {});

}  // namespace chorale::parallel
