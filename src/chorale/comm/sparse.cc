#include "chorale/comm/sparse.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "chorale/base/error.h"
#include "chorale/comm/call_builder.h"
#include "chorale/tensor/device_copy.h"
#include "chorale/trace/trace.h"
#include "chorale/vec/combine.h"

namespace chorale::comm {
namespace {

// Entries of all ranks, one after the other.
struct Entries {
  Tensor indices;  // [nnz, sparse dims]: an entry's indices are together
  Tensor values;   // [nnz, elements of an entry]
};

Tensor transposed(const Tensor& indices) {
  const int64_t dims = indices.size(0), count = indices.size(1);
  const Tensor result = Tensor::empty({count, dims}, DType::kI64);
  const std::vector<int64_t> from = indices.to_vector<int64_t>();
  for (int64_t d = 0; d < dims; ++d) {
    for (int64_t e = 0; e < count; ++e) result.data<int64_t>()[e * dims + d] = from[static_cast<size_t>(d * count + e)];
  }
  return result;
}

Tensor gather_rows(const Group& group, const Tensor& own, const std::vector<int64_t>& counts, int64_t width,
                   const CallOptions& options) {
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const Tensor all = Tensor::empty({total, width}, own.dtype());
  std::vector<Tensor> parts;
  int64_t row = 0;
  for (int64_t count : counts) {
    parts.push_back(all.view_as({count, width}, {width, 1}, row * width));
    row += count;
  }
  group.all_gather(parts, own, options).wait();
  return all;
}

// Three gathers are parts of one call: the trace shows that one, and that the thread waited for it.
Entries gather_entries(const Group& group, const Tensor& tensor, int64_t width, const CallOptions& options) {
  const SparseParts& parts = tensor.sparse();
  const int64_t dims = parts.indices.size(0), own = parts.indices.size(1);
  const auto start = trace::Clock::now();
  const PartsOfOneCall scope;
  std::vector<int64_t> counts(static_cast<size_t>(group.size()));
  group.all_gather_into(std::span(counts), std::span<const int64_t>(&own, 1), options).wait();
  Entries all{gather_rows(group, transposed(parts.indices), counts, dims, options),
              gather_rows(group, parts.values, counts, width, options)};
  if (trace::enabled()) [[unlikely]] {
    trace::Event event{.name = group.backend() + ":sparse_all_reduce",
                       .rank = group.global_rank(group.rank()),
                       .start = start,
                       .end = trace::Clock::now(),
                       .async = true,
                       .shapes = {{tensor.sizes().begin(), tensor.sizes().end()}},
                       .kind = trace::Kind::kCall,
                       .traffic = trace::Traffic{.call = "sparse_all_reduce",
                                                 .dtype = concat(parts.values.dtype()),
                                                 .group = group.name(),
                                                 .ranks = group.members(),
                                                 .in_elems = {parts.values.elems()},
                                                 .out_elems = {all.values.elems()}}};
    trace::record(event);
    event.name = group.backend() + ":wait";
    event.async = false;
    event.shapes.clear();
    event.kind = trace::Kind::kComm;
    event.traffic = trace::Traffic{.call = "wait", .dtype = event.traffic->dtype, .group = group.name()};
    trace::record(std::move(event));
  }
  return all;
}

}  // namespace

Tensor sparse_on(const Tensor& tensor, Device device) {
  const SparseParts& parts = tensor.sparse();
  if (parts.values.device() == device) return tensor;
  const auto moved = [&](const Tensor& x) {
    Tensor copy = Tensor::empty(x.sizes(), x.dtype(), device);
    copy_between_devices(x, copy);
    return copy;
  };
  return Tensor::sparse_coo(moved(parts.indices), moved(parts.values), tensor.sizes(), parts.coalesced);
}

Tensor sparse_all_reduce(const Group& group, const Tensor& tensor, const CallOptions& options) {
  CHORALE_CHECK(tensor.defined() && tensor.is_sparse(), "[sparse_all_reduce] the tensor is not sparse");
  if (const Device device = tensor.sparse().values.device(); device != kCpu)
    return sparse_on(sparse_all_reduce(group, sparse_on(tensor, kCpu), options), device);
  const SparseParts& parts = tensor.sparse();
  const int64_t dims = parts.indices.size(0);
  Shape dense(parts.values.sizes().begin() + 1, parts.values.sizes().end());
  const int64_t width = count_elems(dense);
  const Entries all = gather_entries(group, tensor, width, options);
  const int64_t total = all.indices.size(0);
  const int64_t* indices = all.indices.data<int64_t>();
  const auto entry = [&](int64_t e) { return std::span(indices + e * dims, static_cast<size_t>(dims)); };
  std::vector<int64_t> order(static_cast<size_t>(total));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::lexicographical_compare(entry(a).begin(), entry(a).end(), entry(b).begin(), entry(b).end());
  });
  const auto equal = [&](int64_t a, int64_t b) {
    return std::equal(entry(a).begin(), entry(a).end(), entry(b).begin());
  };
  std::vector<size_t> starts;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i == 0 || !equal(order[i - 1], order[i])) starts.push_back(i);
  }
  const auto distinct = static_cast<int64_t>(starts.size());
  Shape value_sizes{distinct};
  for (int64_t size : dense) value_sizes.push_back(size);
  const Tensor sum_indices = Tensor::empty({dims, distinct}, DType::kI64);
  const Tensor sum_values = Tensor::empty(value_sizes, parts.values.dtype());
  const size_t row_bytes = static_cast<size_t>(width) * sum_values.elem_bytes();
  std::vector<const void*> sources;
  for (int64_t k = 0; k < distinct; ++k) {
    const size_t first = starts[static_cast<size_t>(k)];
    const size_t last = k + 1 < distinct ? starts[static_cast<size_t>(k + 1)] : order.size();
    for (int64_t d = 0; d < dims; ++d)
      sum_indices.data<int64_t>()[d * distinct + k] = entry(order[first])[static_cast<size_t>(d)];
    void* to[] = {static_cast<std::byte*>(sum_values.raw()) + static_cast<size_t>(k) * row_bytes};
    // A hundred at a time: an index may occur any number of times within a rank.
    constexpr size_t kAtOnce = 100;
    for (size_t begin = first; begin < last; begin += kAtOnce) {
      sources.clear();
      if (begin > first) sources.push_back(to[0]);
      for (size_t i = begin; i < std::min(last, begin + kAtOnce); ++i)
        sources.push_back(static_cast<const std::byte*>(all.values.raw()) + static_cast<size_t>(order[i]) * row_bytes);
      vec::combine(Reduce::kSum, sum_values.dtype(), sources, to, width);
    }
  }
  return Tensor::sparse_coo(sum_indices, sum_values, tensor.sizes(), true);
}

}  // namespace chorale::comm
