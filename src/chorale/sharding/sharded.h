// Sharded tensors: one tensor over the ranks of a mesh. Each rank holds a part; ops, autograd, optimizers and modules
// take it for the whole.
//
//   const Mesh mesh(world, {4}, {"tp"});
//   const Tensor w = distribute(weight, mesh, {shard(0)});   // each rank has a quarter of the rows
//   const Tensor y = matmul(x, transpose(w, 0, 1));          // x is sharded too; nothing is sent here
//   full_tensor(y)                                           // an ordinary tensor on every rank
//
// Every rank of the mesh makes the same calls in the same order. A rank outside the mesh makes them too: it has empty
// parts there, 0 for scalars, and sends nothing. Whole and sharded tensors do not mix in one op: distribute() the whole
// one. Excepted are tensors of one element, and everything inside an ImplicitReplication scope.
#pragma once

#include <functional>
#include <optional>

#include "chorale/base/generator.h"
#include "chorale/sharding/layout.h"
#include "chorale/tensor/tensor.h"

namespace chorale {

// ---- what a sharded tensor says of itself; InvalidArgument for any other

const Mesh& mesh_of(const Tensor& x);
const Placements& placements_of(const Tensor& x);

// ---- into and out of it

// Parts of the tensor that rank `source` of each line of the mesh has, which is sent to the others; without one, every
// rank cuts its own tensor, which must be the same everywhere. x is a leaf; the result is one, and asks for gradients
// if x does. Partial: sums and averages only.
Tensor distribute(const Tensor& x, const Mesh& mesh, const Placements& placements, std::optional<int> source = 0);

struct FromLocalOptions {
  // Sizes and strides of the whole tensor; both or none. Without them, parts are taken to be equal.
  std::optional<Shape> sizes{};
  std::optional<Strides> strides{};
  // Compares shapes, dtypes and the like over all ranks, and makes copies equal to those of the first rank. A
  // collective.
  bool check = false;
  // How the gradient of the part is placed; by default as the tensor, but whole where that is partial.
  std::optional<Placements> grad_placements{};
};
// A sharded tensor of which this rank has `local`. Sends nothing.
Tensor from_local(const Tensor& local, const Mesh& mesh, const Placements& placements,
                  const FromLocalOptions& options = {});
// This rank's part. The gradient that comes back is taken to be placed as x is (whole where x is partial), unless said
// otherwise: ranks that compute different things from a copy each have a part of its gradient only: partial().
Tensor to_local(const Tensor& x, const std::optional<Placements>& grad_placements = {});
// All of it, on every rank.
Tensor full_tensor(const Tensor& x, const std::optional<Placements>& grad_placements = {});

struct RedistributeOptions {
  std::optional<DType> forward_dtype{};   // x is cast before it is sent, and stays so
  std::optional<DType> backward_dtype{};  // the gradient is sent in this type; it ends in x's
  bool async = false;                     // only begun; whatever reads the result waits
};
// The same values otherwise placed. A partial target must be what x is there already.
Tensor redistribute(const Tensor& x, const Placements& placements, const RedistributeOptions& options = {});

// x. Its gradient is made to be placed as x is (a copy where x is partial) here, once, whatever ops before it would do
// with another one.
Tensor align_gradient(const Tensor& x);

// ---- out of nothing; random ones are what one rank would draw

Tensor empty(const Shape& sizes, const Mesh& mesh, const Placements& placements, DType dtype = DType::kF32);
Tensor full(const Shape& sizes, Scalar value, const Mesh& mesh, const Placements& placements,
            DType dtype = DType::kF32);
Tensor zeros(const Shape& sizes, const Mesh& mesh, const Placements& placements, DType dtype = DType::kF32);
Tensor ones(const Shape& sizes, const Mesh& mesh, const Placements& placements, DType dtype = DType::kF32);
Tensor uniform(const Shape& sizes, const Mesh& mesh, const Placements& placements, double low = 0, double high = 1,
               DType dtype = DType::kF32, Generator& generator = default_generator());
Tensor normal(const Shape& sizes, const Mesh& mesh, const Placements& placements, double mean = 0, double stddev = 1,
              DType dtype = DType::kF32, Generator& generator = default_generator());

// True if both have the same shape and values; the same answer on all ranks of the mesh, and true on ranks outside.
bool equal_sharded(const Tensor& a, const Tensor& b);

// Runs `function` on parts: arguments are redistributed as `in` says and handed over as ordinary tensors; what it
// returns is taken for parts placed as `out` says. Differentiable.
std::vector<Tensor> local_map(const std::function<std::vector<Tensor>(const std::vector<Tensor>&)>& function,
                              const std::vector<Tensor>& args, const std::vector<Placements>& in,
                              const std::vector<Placements>& out);

// While the scope lasts, whole tensors that meet sharded ones in an op are taken for copies that every rank has.
class ImplicitReplication {
 public:
  ImplicitReplication();
  ~ImplicitReplication();
  ImplicitReplication(const ImplicitReplication&) = delete;
  ImplicitReplication& operator=(const ImplicitReplication&) = delete;

 private:
  bool before_;
};

namespace sharding {

// What is in the tensor's extension slot.
struct Sharded final : TensorExtension {
  Sharded(std::shared_ptr<const Layout> where, Tensor part)
      : TensorExtension(Kind::kSharded), layout(std::move(where)), local(std::move(part)) {}
  ~Sharded() override {
    if (alive) *alive = nullptr;
  }
  // An alias has an alias of a part that is traced: what autograd keeps does not keep the part itself in use.
  std::unique_ptr<TensorExtension> copy() const override {
    return std::make_unique<Sharded>(layout, local.is_traced() ? local.alias() : local);
  }
  std::string why_no_bytes(const Tensor& tensor) const override;

  std::shared_ptr<const Layout> layout;
  mutable Tensor local;                    // without history; may still be on its way
  std::shared_ptr<Tensor::Impl*> alive{};  // tells a ShardedWatch whether the tensor is still there
};

inline const Sharded& sharded(const Tensor& x) { return static_cast<const Sharded&>(*x.extension()); }
// The part, once it is there.
const Tensor& local_of(const Tensor& x);
Tensor wrap(std::shared_ptr<const Layout> layout, const Shape& sizes, const Strides& strides, Tensor local);
// One object per mesh and placements on each thread, so that equal layouts are found by address.
std::shared_ptr<const Layout> layout_of(const Mesh& mesh, const Placements& placements);

// Whether such a scope is open on this thread, or a backward runs: whole tensors that gradient rules make (zeros, ones)
// are the same on every rank.
bool replicates_implicitly();

}  // namespace sharding
}  // namespace chorale
