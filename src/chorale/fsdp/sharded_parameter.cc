#include "chorale/fsdp/sharded_parameter.h"

#include "chorale/api/api.h"
#include "chorale/autograd/backward.h"
#include "chorale/autograd/node.h"
#include "chorale/base/error.h"
#include "chorale/op/builder.h"

namespace chorale::fsdp {
namespace {

// The layout of a parameter that is cut over `mesh`, having been sharded as `inner` before.
std::shared_ptr<const sharding::Layout> outer_layout(const Tensor& parameter, const Mesh& mesh, int64_t dim,
                                                     const sharding::Layout* inner) {
  Placements placements(mesh.dims());
  placements.back() = shard(dim);
  if (!inner) return sharding::layout_of(mesh, placements);
  std::vector<std::string> names = mesh.names();
  names.insert(names.end(), inner->mesh.names().begin(), inner->mesh.names().end());
  for (size_t m = 0; m < inner->placements.size(); ++m) {
    const Placement& p = inner->placements[m];
    CHORALE_CHECK(!p.is_partial() && !(p.is_strided() && p.dim() == dim), "[fully_shard] a parameter of shape ",
                  parameter.sizes(), " that is sharded as ", inner->placements, " cannot be sharded further");
    // The inner shards were cut first: a rank has its part of each of them.
    if (p.is_shard() && p.dim() == dim) placements[mesh.dims() - 1] = strided_shard(dim, inner->mesh.shape()[m]);
  }
  placements.insert(placements.end(), inner->placements.begin(), inner->placements.end());
  return sharding::layout_of(mesh.root().slice(names), placements);
}

}  // namespace

ShardedParameter::ShardedParameter(const Tensor& parameter, const Mesh& mesh, int64_t dim)
    : sharded_(parameter), dim_(dim) {
  if (parameter.is_sharded()) inner_ = sharding::sharded(parameter).layout;
  const Tensor local = inner_ ? sharding::local_of(parameter) : detach(parameter);
  local_sizes_ = local.sizes();
  const comm::Group& shards = mesh.group(mesh.dims() - 1);
  const int64_t size = local_sizes_[static_cast<size_t>(dim)];
  const auto layout = outer_layout(parameter, mesh, dim, inner_.get());
  const op::Chunk own = op::chunk_of(size, shards.size(), shards.rank());
  Shape sizes = local_sizes_;
  sizes[static_cast<size_t>(dim)] = own.size;
  Tensor part = Tensor::empty(sizes, parameter.dtype(), parameter.device());
  {
    const NoGrad quiet;
    if (part.device().type != DeviceType::kNull) copy_(part, narrow(local, dim, own.first, own.size));
  }
  make_whole(parameter.dtype(), kCpu);  // another one when it gets bytes of another device
  op::current().set_data(
      sharded_, sharding::wrap(layout, parameter.sizes(), contiguous_strides(parameter.sizes()), std::move(part)));
  take_bytes();
}

void ShardedParameter::make_whole(DType dtype, Device device) {
  holder_ = Tensor::empty(local_sizes_, dtype, device);
  whole_ = inner_ ? sharding::wrap(inner_, sharded_.sizes(), contiguous_strides(sharded_.sizes()), holder_) : holder_;
}

bool ShardedParameter::wants_gradient() const { return requires_grad(sharded_); }

Tensor ShardedParameter::room(DType dtype) const {
  return Tensor::empty(local_sizes_, is_floating(sharded_.dtype()) ? dtype : sharded_.dtype(),
                       sharding::local_of(sharded_).device());
}

Tensor ShardedParameter::room_like(const Tensor& part) const {
  Shape sizes = part.sizes();
  sizes[static_cast<size_t>(dim_)] = local_sizes_[static_cast<size_t>(dim_)];
  return Tensor::empty(sizes, part.dtype(), part.device());
}

Tensor ShardedParameter::chunk(const Tensor& whole, int ranks, int rank) const {
  const auto d = static_cast<size_t>(dim_);
  const op::Chunk part = op::chunk_of(whole.sizes()[d], ranks, rank);
  Shape sizes = whole.sizes();
  sizes[d] = part.size;
  return whole.view_as(sizes, whole.strides(), whole.offset() + (part.size > 0 ? part.first * whole.strides()[d] : 0));
}

Tensor ShardedParameter::part(DType dtype) const {
  const Tensor& local = sharding::local_of(sharded_);
  if (!is_floating(local.dtype()) || local.dtype() == dtype) return local;
  const NoGrad quiet;
  return to(local, dtype);
}

void ShardedParameter::give_bytes(const Tensor& room) {
  if (room.dtype() != whole_.dtype() || room.device() != holder_.device()) {
    make_whole(room.dtype(), room.device());
    take_bytes();
  }
  holder_.storage()->take_bytes_of(*room.storage());
  holder_.impl()->data = holder_.storage()->data();
  if (!inner_) whole_.impl()->extension = nullptr;
  if (is_differentiable(whole_.dtype())) set_requires_grad(whole_, wants_gradient());
}

void ShardedParameter::take_bytes() {
  const base::Intrusive<Storage> gone = Storage::without_bytes(holder_.device());
  gone->take_bytes_of(*holder_.storage());
  holder_.impl()->data = nullptr;
  // Code that still holds the whole one is told why there are no bytes.
  if (!inner_) whole_.impl()->extension = sharding::sharded(sharded_).copy();
}

void ShardedParameter::keep_piece(const Mesh& mesh) {
  const NoGrad quiet;
  const comm::Group& group = mesh.group(size_t{0});
  piece_ = clone(chunk(holder_, group.size(), group.rank()));
  Placements placements{shard(dim_)};
  registered_piece_ =
      sharding::wrap(sharding::layout_of(mesh, placements), local_sizes_, contiguous_strides(local_sizes_), piece_);
}

Tensor ShardedParameter::local_gradient(const Tensor& gradient) const {
  if (!inner_) return gradient;
  const NoGrad quiet;
  return sharding::local_of(placements_of(gradient) == inner_->placements ? gradient
                                                                          : redistribute(gradient, inner_->placements));
}

void ShardedParameter::add_gradient(const Tensor& part) const {
  const NoGrad quiet;
  const Tensor own = part.dtype() == sharded_.dtype() ? part : to(part, sharded_.dtype());
  if (const Tensor before = gradient(sharded_); before.defined()) {
    add_(sharding::local_of(before), own);
  } else {
    set_gradient(sharded_,
                 sharding::wrap(sharding::sharded(sharded_).layout, sharded_.sizes(), sharded_.strides(), own));
  }
  if (const autograd::Slot* slot = autograd::slot_of(sharded_); slot && slot->extras) {
    slot->extras->accumulated.for_each(
        [&](const autograd::LeafHook& hook) { hook(sharded_, autograd::current_sink()); });
    complete_gradient(sharded_);
  }
}

}  // namespace chorale::fsdp
