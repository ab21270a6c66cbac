// Collectives as ops: recorded, differentiated, traced like any other. What the gradient of each means on several ranks
// is said at the top of op/defs/collective.cc.
#pragma once

#include <memory>
#include <vector>

#include "chorale/op/group_tensor.h"
#include "chorale/op/op_def.h"

namespace chorale {

// Every rank of the group calls these, in the same order, with tensors of equal dtype.

Tensor all_reduce(const Tensor& x, const Tensor& group, Reduce reduce = Reduce::kSum);
// The chunks of all ranks, put together along `dim`. `whole`: the size of the result there, where chunks are those of
// op::chunk_of; if left out, all have the size of this one.
Tensor all_gather(const Tensor& x, const Tensor& group, int64_t dim = 0, int64_t whole = -1);
// This rank's chunk along `dim` of the sum, which need not be divisible.
Tensor reduce_scatter(const Tensor& x, const Tensor& group, int64_t dim = 0, Reduce reduce = Reduce::kSum);
// The root's x, which all have in the same shape. Roots and peers are global ranks.
Tensor broadcast(const Tensor& x, const Tensor& group, int root);
// The sum on the root, zeros elsewhere.
Tensor reduce(const Tensor& x, const Tensor& group, int root);
// x is cut along `cut` into one chunk per rank; what comes from all ranks is put together along `join`, which has
// `whole` elements then (if left out: as many times x's as there are ranks).
Tensor all_to_all(const Tensor& x, const Tensor& group, int64_t cut = 0, int64_t join = 0, int64_t whole = -1);

// Those that write into tensors of the caller's, return nothing, and are done when they return. In a graph the tensors
// are seen as written.
void all_reduce_(const Tensor& x, const Tensor& group, Reduce reduce = Reduce::kSum);
void all_gather_into(const Tensor& out, const Tensor& x, const Tensor& group, int64_t dim = 0);
void all_gather_into(const std::vector<Tensor>& outs, const Tensor& x, const Tensor& group);
void reduce_scatter_into(const Tensor& out, const Tensor& x, const Tensor& group, int64_t dim = 0,
                         Reduce reduce = Reduce::kSum);
// Chunk i of x's first dimension goes to rank i; out has what came, in the order of ranks.
void all_to_all_into(const Tensor& out, const Tensor& x, const Tensor& group);

// Sends x to a rank that receives. The result is empty; for a gradient of x, backward must reach it: sum() it into the
// loss, or pass it to backward() as a further root.
Tensor send(const Tensor& x, const Tensor& group, int destination, int64_t tag = 0);
// What a rank sends. `after`: anything of this rank; if it leads to a leaf, backward sends the gradient of the result
// back to the source.
Tensor receive(const Tensor& after, const Tensor& group, int source, const Shape& sizes, DType dtype, int64_t tag = 0);

// The same, begun only: ops that follow run meanwhile, and wait_for() gives the result. A read before that throws
// and says so. Work of a group moves as Group::moves_by_itself says.
Tensor start_all_reduce(const Tensor& x, const Tensor& group, Reduce reduce = Reduce::kSum);
// The sum of what each rank has, times 1/ranks: the bits of data-parallel training.
Tensor start_average(const Tensor& x, const Tensor& group);
Tensor start_all_gather(const Tensor& x, const Tensor& group, int64_t dim = 0, int64_t whole = -1);
Tensor start_reduce_scatter(const Tensor& x, const Tensor& group, int64_t dim = 0, Reduce reduce = Reduce::kSum);
Tensor start_broadcast(const Tensor& x, const Tensor& group, int root);
Tensor start_all_to_all(const Tensor& x, const Tensor& group, int64_t cut = 0, int64_t join = 0, int64_t whole = -1);
// x must not be written before the wait.
Tensor start_send(const Tensor& x, const Tensor& group, int destination, int64_t tag = 0);
Tensor start_receive(const Tensor& after, const Tensor& group, int source, const Shape& sizes, DType dtype,
                     int64_t tag = 0);
// The result of a collective or message that was begun, once it is there. Any other tensor is returned as it is.
Tensor wait_for(const Tensor& pending);
bool is_pending(const Tensor& tensor);

namespace op {
// Whether a row sends something to other ranks, or waits for it. Its kernel of the CPU is called on the host for
// tensors of any device (defs/pending.h).
bool communicates(const OpDef& row);
}  // namespace op

}  // namespace chorale
