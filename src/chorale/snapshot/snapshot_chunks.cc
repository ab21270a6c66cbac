#include "chorale/autograd/autograd.h"
#include "chorale/base/error.h"
#include "chorale/op/view.h"
#include "chorale/sharding/sharded.h"
#include "chorale/snapshot/snapshot.h"

namespace chorale::snapshot {
namespace {

// A strided shard has several stretches of a dimension of the whole, one behind the other in the part: one box for each
// combination of stretches.
void add_boxes(State& state, const TensorChunk& chunk, const std::vector<sharding::Runs>& runs, size_t dim) {
  if (dim == runs.size()) {
    state.chunks.push_back(chunk);
    return;
  }
  int64_t at = 0;
  for (const op::Chunk& run : runs[dim]) {
    TensorChunk box = chunk;
    box.offsets[dim] = run.first;
    if (runs[dim].size() > 1) box.local = narrow(chunk.local, static_cast<int64_t>(dim), at, run.size);
    at += run.size;
    add_boxes(state, box, runs, dim + 1);
  }
}

}  // namespace

void add_chunks(State& state, const std::string& key, const Tensor& x) {
  if (!x.defined() || !x.is_sharded()) {
    const Shape sizes = x.defined() ? x.sizes() : Shape{};
    state.chunks.push_back({key, sizes, Shape(sizes.size(), 0), x});
    return;
  }
  const sharding::Layout& layout = *sharding::sharded(x).layout;
  for (const Placement& placement : layout.placements) {
    CHORALE_CHECK(!placement.is_partial(), "[checkpoint] ", key, " is placed as ", layout.placements, " over a ",
                  layout.mesh, ": no rank has any of its values; redistribute() it first");
  }
  if (!layout.mesh.is_member()) return;
  const NoGrad quiet;
  std::vector<sharding::Runs> runs;
  runs.reserve(x.sizes().size());
  for (size_t d = 0; d < x.sizes().size(); ++d) {
    runs.push_back(sharding::runs_of(x.sizes()[d], static_cast<int64_t>(d), layout.mesh, layout.placements,
                                     layout.mesh.dims(), layout.mesh.coordinates()));
  }
  add_boxes(state, {key, x.sizes(), Shape(x.sizes().size(), 0), sharding::local_of(x)}, runs, 0);
}

State state_of(const NamedTensors& tensors, const std::string& prefix) {
  State state;
  state.chunks.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) add_chunks(state, prefix + name, tensor);
  return state;
}

}  // namespace chorale::snapshot
