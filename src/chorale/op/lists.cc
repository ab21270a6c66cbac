#include "chorale/op/lists.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/op/shard_ways.h"

namespace chorale::op {

ListCall::ListCall(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs) : in_(in), lists_(op.lists(attrs)) {
  CHORALE_CHECK(in.size() > lists_.own && (in.size() - lists_.own) % lists_.count == 0, "[", op.name, "] expects ",
                lists_.own, " tensors and then ", lists_.count, " lists of one length (", op.inputs, "), found ",
                in.size(), " tensors");
  length_ = (in.size() - lists_.own) / lists_.count;
  for_each_written([&](size_t, size_t, size_t count) { results_ += count; });
  results_ += lists_.fresh * length_;
}

bool ListCall::in_place(std::span<const Tensor> out) const {
  if (out.size() != results_ || lists_.written.empty()) return false;
  bool same = true;
  for_each_written([&](size_t input, size_t result, size_t count) {
    for (size_t i = 0; i < count; ++i) same &= in_[input + i].is(out[result + i]);
  });
  return same;
}

size_t result_count(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs) {
  return op.lists ? ListCall(op, in, attrs).results() : static_cast<size_t>(op.outputs);
}

void prepare_in_place(const OpDef& op, const ListCall& call, std::span<const Tensor> in, const Attrs& attrs,
                      std::span<const Tensor> out) {
  check_inputs(op, in);
  op.infer({op, in, attrs}, {});
  for (const Tensor& written : out) written.storage()->check_writable(op.name);
  // Fresh results are numbers without dimensions.
  for (const Tensor& fresh : out.last(call.lists().fresh * call.length()))
    CHORALE_CHECK(fresh.dims() == 0 && fresh.dtype() == DType::kF64, "[", op.name,
                  "] the result has shape [] and dtype f64 but the tensor to write into is ", fresh.dtype(), " ",
                  fresh.sizes());
}

void infer_written(const ListCall& call, std::span<const Tensor> in, std::span<OutSpec> out) {
  size_t described = 0;
  call.for_each_written([&](size_t input, size_t result, size_t count) {
    for (size_t i = 0; i < count; ++i) static_cast<TensorSpec&>(out[result + i]) = spec_of(in[input + i]);
    described = result + count;
  });
  for (OutSpec& fresh : out.subspan(described)) {
    fresh.dtype = DType::kF64;
    fresh.device = in.back().device();
  }
}

std::vector<ShardWay> split_lists(const ShardCall& call, InputSet alike, Partial fresh) {
  std::vector<ShardWay> ways;
  const ListCall lists(call.op, call.in, call.attrs);
  const size_t own = lists.lists().own;
  int64_t dims = 0;
  size_t shapes = 0;  // the first of the lists that are split
  while (!alike.has(shapes)) ++shapes;
  for (const Tensor& x : lists.list(shapes)) dims = std::max(dims, x.dims());
  for (int64_t d = 0; d < dims; ++d) {
    const auto splits = [&](size_t place) { return lists.list(shapes)[place].dims() > d; };
    std::vector<Placement> in(call.in.size()), out(call.out.size());
    for (size_t l = 0; l < lists.lists().count; ++l) {
      for (size_t i = 0; i < lists.length(); ++i) {
        if (alike.has(l) && splits(i)) in[own + l * lists.length() + i] = Placement::shard(d);
      }
    }
    size_t described = 0;
    lists.for_each_written([&](size_t input, size_t result, size_t count) {
      for (size_t i = 0; i < count; ++i) out[result + i] = in[input + i];
      described = result + count;
    });
    for (size_t i = described; i < out.size(); ++i) {
      if (splits((i - described) % lists.length())) out[i] = Placement::partial(fresh);
    }
    ways.push_back({std::move(in), std::move(out)});
  }
  return ways;
}

}  // namespace chorale::op
