// One parameter of a fully sharded module.
//
// Note [Two tensors] The tensor that the module was built with becomes the sharded one: optimizers and other
// code that holds it have it for ever. Computing is done with another tensor, the whole one, which takes its place in
// the module while it is gathered. Its bytes come and go under the same object and the same storage, without counting
// as a write: gradient rules that saved it, or a view of it, find the bytes that are there when they run
// (Saved::unpack).
#pragma once

#include <string>
#include <vector>

#include "chorale/comm/group.h"
#include "chorale/fsdp/fully_shard.h"
#include "chorale/graph/recording.h"
#include "chorale/op/placement.h"
#include "chorale/sharding/sharded.h"

namespace chorale::fsdp {

class ShardedParameter {
 public:
  // `parameter` is cut by `dim` over the last dimension of the mesh and becomes sharded; every rank takes its part of
  // its own values.
  ShardedParameter(const Tensor& parameter, const Mesh& mesh, int64_t dim);

  const Tensor& sharded() const { return sharded_; }
  const Tensor& whole() const { return whole_; }
  int64_t dim() const { return dim_; }
  const Shape& local_sizes() const { return local_sizes_; }  // of the whole, or of what a rank of tensor parallel has
  bool wants_gradient() const;

  // Memory for what `part`, which is as long as this rank's part, is a part of.
  Tensor room_like(const Tensor& part) const;
  // Memory for all of it, in this dtype (of a parameter that is not floating: its own).
  Tensor room(DType dtype) const;
  // The part of `whole` that one of so many ranks has.
  Tensor chunk(const Tensor& whole, int ranks, int rank) const;
  // This rank's part, cast.
  Tensor part(DType dtype) const;
  // The whole tensor gets these bytes, or gives its bytes back.
  void give_bytes(const Tensor& room);
  void take_bytes();

  // Tells what is recorded that the whole tensor's bytes come and go.
  void note_managed(graph::Recording& recording) const {
    recording.note_managed(*holder_.storage(), "fully sharded", name);
  }

  // Keeps the part that one of fewer ranks has, and what stands for the parameter then.
  void keep_piece(const Mesh& mesh);
  const Tensor& piece() const { return piece_; }
  const Tensor& registered_piece() const { return registered_piece_; }
  void drop_piece() { piece_ = registered_piece_ = {}; }

  // A gradient of the whole as this rank has it: an ordinary tensor.
  Tensor local_gradient(const Tensor& gradient) const;
  // Adds a reduced part to the sharded parameter's gradient, in its dtype, and runs what waits for it.
  void add_gradient(const Tensor& part) const;

  std::string name{};
  Tensor accumulated{};              // whole gradients that were not reduced yet
  Tensor unreplicated{};             // reduced over shards, not yet over replicas
  std::optional<Payload> payload{};  // instead of the part
  uint32_t version = 0;              // of the shard's memory when it was gathered

 private:
  void make_whole(DType dtype, Device device);

  Tensor sharded_, whole_;
  Tensor holder_;  // the tensor whose bytes come and go: whole_, or its local part where tensor parallel shards it, too
  std::shared_ptr<const sharding::Layout> inner_;  // how it was sharded before (tensor parallel); or null
  Shape local_sizes_;                              // of holder_
  int64_t dim_;
  Tensor piece_, registered_piece_;
};

}  // namespace chorale::fsdp
