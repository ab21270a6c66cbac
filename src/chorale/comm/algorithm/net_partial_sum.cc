#include "chorale/comm/algorithm/net_partial_sum.h"

#include <algorithm>

#include "chorale/vec/combine.h"
#include "chorale/vec/loops.h"

namespace chorale::comm {
namespace {

constexpr size_t kSumPieceBytes = 4 << 20;

int64_t elems_in(const Chunk& data, DType dtype) { return static_cast<int64_t>(data.bytes / size_of(dtype)); }

}  // namespace

Chunk chunk_of(const Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.raw()), static_cast<size_t>(tensor.elems()) * tensor.elem_bytes()};
}
Chunk part(const Chunk& whole, int64_t begin, int64_t end, size_t elem) {
  return {whole.data + static_cast<size_t>(begin) * elem, static_cast<size_t>(end - begin) * elem};
}
Chunk part(const Chunk& whole, const Slice& slice, size_t elem) { return part(whole, slice.begin, slice.end, elem); }

std::vector<Slice> pieces_of(const Slice& slice, size_t elem) {
  const auto most = static_cast<int64_t>(kSumPieceBytes / elem);
  std::vector<Slice> pieces;
  int64_t at = slice.begin;
  do {
    pieces.push_back({at, std::min(slice.end, at + most)});
    at = pieces.back().end;
  } while (at < slice.end);
  return pieces;
}

PartialSum::PartialSum(NetCall& call, const Chunk& data, bool own)
    : call_(call), size_(static_cast<size_t>(call.group.size())), elems_(elems_in(data, call.operation.dtype)) {
  const Operation& operation = call.operation;
  for (const auto& members : call.layout.hosts) leaves_ = leaves_ && members.size() == 1;
  leaves_ = leaves_ && operation.reduction.factor == 1;
  dtype_ = is_half(operation.dtype) && !leaves_ ? DType::kF32 : operation.dtype;
  values_ = data;
  if (dtype_ == operation.dtype && !own) return;
  values_ = chunk_of(call.buffer(elems_, dtype_));
  vec::convert_loop(operation.dtype, dtype_)(data.data, values_.data, elems_);
}

Reduction PartialSum::first_step() const {
  Reduction reduction = call_.operation.reduction;
  if (reduction.op == Reduce::kAverage) reduction.op = Reduce::kSum;
  return reduction;
}

void PartialSum::last_step(std::span<const void* const> hosts, const Chunk& to, int64_t elems) const {
  const Operation& operation = call_.operation;
  if (dtype_ == operation.dtype) {
    void* out[] = {to.data};
    vec::combine(operation.reduction.op, dtype_, hosts, out, elems, 1, size_);
    return;
  }
  const Tensor sum = Tensor::empty({elems}, dtype_);
  void* out[] = {sum.raw()};
  vec::combine(operation.reduction.op, dtype_, hosts, out, elems, 1, size_);
  vec::convert_loop(dtype_, operation.dtype)(sum.raw(), to.data, elems);
}

Leaves::Leaves(NetCall& call, const Chunk& own) : sources_(static_cast<size_t>(call.group.size())) {
  const Chunk memory = chunk_of(call.buffer(static_cast<int64_t>(sources_.size() * own.bytes)));
  for (size_t r = 0; r < sources_.size(); ++r) sources_[r] = memory.data + r * own.bytes;
  sources_[static_cast<size_t>(call.group.rank())] = own.data;
  bytes_ = own.bytes;
}

void combine_leaves(const NetCall& call, const std::vector<const void*>& leaves, const Chunk& to) {
  const Operation& operation = call.operation;
  void* out[] = {to.data};
  vec::combine(operation.reduction.op, operation.dtype, leaves, out,
               static_cast<int64_t>(to.bytes / size_of(operation.dtype)), operation.reduction.factor);
}

}  // namespace chorale::comm
