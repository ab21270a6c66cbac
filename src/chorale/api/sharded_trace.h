// Sharded tensors in compiled functions. A graph holds this rank's parts: what is traced of a sharded tensor is its
// part, collectives between parts are nodes, and around results and gradients the whole tensor is put again.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "chorale/graph/recording.h"
#include "chorale/sharding/sharded.h"
#include "chorale/sharding/sharded_watch.h"

namespace chorale::compiled {

using LayoutPtr = std::shared_ptr<const sharding::Layout>;

// What a part is a part of.
struct Whole {
  LayoutPtr layout;
  Shape sizes;
  Strides strides;
  Tensor around(Tensor part) const { return sharding::wrap(layout, sizes, strides, std::move(part)); }
  Shape part_sizes() const { return sharding::own_part(sizes, *layout).sizes; }
};
// Absent where x is not sharded.
std::optional<Whole> whole_of(const Tensor& x);
// This rank's part, which may still be on its way; another tensor as it is.
inline const Tensor& part_of(const Tensor& x) { return x.defined() && x.is_sharded() ? sharding::sharded(x).local : x; }
// What gradients of x are made to be before a graph reads them: placed as x is, and whole where that is partial.
Whole gradient_like(const Whole& x);
// The part of a gradient that comes to a graph, which takes it placed so.
Tensor part_of_gradient(const Tensor& gradient, const Whole& wanted);

bool same_layout(const LayoutPtr& a, const LayoutPtr& b);
bool same_layouts(const std::vector<LayoutPtr>& a, const std::vector<LayoutPtr>& b);

// The sharded tensors that a recording meets, for as long as this lives.
class ShardedSeen final : public sharding::ShardedWatch {
 public:
  explicit ShardedSeen(graph::Recording& recording)
      : recording_(recording), before_(std::exchange(sharding::sharded_watch, this)) {}
  ~ShardedSeen() { sharding::sharded_watch = before_; }
  ShardedSeen(const ShardedSeen&) = delete;
  ShardedSeen& operator=(const ShardedSeen&) = delete;

  void note_used(const Tensor& x) override;
  void note_made(const Tensor& x) override;
  void note_constant(const Tensor& x) override;

  // Those that were made here, of parts that are traced, and that are still there.
  std::vector<Tensor> alive() const;
  // Leaves from outside, of whole graphs.
  const std::vector<Tensor>& leaves() const { return leaves_; }
  // How tensors were placed, each way once, as they came.
  const std::vector<LayoutPtr>& layouts() const { return layouts_; }
  void clear();

 private:
  void note_layout(const LayoutPtr& layout);

  graph::Recording& recording_;
  sharding::ShardedWatch* before_;
  std::vector<std::shared_ptr<Tensor::Impl*>> made_;
  std::vector<Tensor> leaves_;
  std::vector<LayoutPtr> layouts_;
};

}  // namespace chorale::compiled
