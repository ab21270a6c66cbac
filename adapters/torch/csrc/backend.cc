#include "backend.h"

#include "chorale/base/config.h"
#include "convert.h"

namespace chorale_torch {
namespace {

using c10d::OpType;
using chorale::comm::Operations;

// The words of the profiler: "chorale:all_reduce". PyTorch's own tests look for another backend's name.
const char* title_of(const char* call) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::string> titles;
  const std::lock_guard lock(mutex);
  auto& title = titles[call];
  if (title.empty())
    title = chorale::config::env("CHORALE_TORCH_PROFILE_AS").value_or("chorale") + std::string(":") + call;
  return title.c_str();
}

const at::Tensor& the_one(const std::vector<at::Tensor>& tensors, const char* call) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "chorale: ", call, " takes one tensor, not ", tensors.size());
  return tensors[0];
}

// One work for several calls.
chorale::comm::Work joined(const std::vector<chorale::comm::Work>& works) {
  Operations all;
  for (const auto& work : works) {
    for (const auto& operation : work.operations()) all.push_back(operation);
  }
  return works.empty() ? chorale::comm::Work() : chorale::comm::Work(works[0].engine(), std::move(all));
}

}  // namespace

Backend::Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout)
    : c10d::Backend(rank, size), timeout_(timeout) {
  translated([&] {
    BorrowedStore meeting(store);
    group_ = chorale::comm::Group::connect(meeting, "torch", rank, size, {.timeout = timeout});
  });
}

Backend::~Backend() = default;

uint64_t Backend::number() const { return static_cast<uint64_t>(group_.sequence_number()); }
uint64_t Backend::getSequenceNumberForGroup() { return number(); }

chorale::comm::CallOptions Backend::call_options(std::chrono::milliseconds timeout) const {
  chorale::comm::CallOptions options;
  options.timeout = timeout.count() > 0 ? timeout : timeout_;
  return options;
}

Backend::WorkHandle Backend::started(Work::Parts parts, bool async) {
  if (collecting_) {
    for (const auto& operation : parts.work.operations()) collected_.push_back(operation);
    collected_results_.insert(collected_results_.end(), parts.results.begin(), parts.results.end());
    parts.work = chorale::comm::Work(group_.engine(), parts.work.operations());
  }
  parts.title = title_of(parts.title);
  auto work = c10::make_intrusive<Work>(getRank(), number(), std::move(parts));
  if (async) mover_.add(work);
  return work;
}

void Backend::startCoalescing() {
  collecting_ = true;
  collected_.clear();
  collected_results_.clear();
}

Backend::WorkHandle Backend::endCoalescing() {
  collecting_ = false;
  Work::Parts parts;
  parts.type = OpType::COALESCED;
  parts.title = "coalesced";
  parts.results = std::move(collected_results_);
  parts.work = chorale::comm::Work(group_.engine(), std::exchange(collected_, {}));
  return started(std::move(parts), true);
}

Backend::WorkHandle Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = the_one(tensors, "broadcast");
  auto work = translated([&] {
    return group_.broadcast(view_of(tensor, true), static_cast<int>(options.rootRank), call_options(options.timeout));
  });
  return started({OpType::BROADCAST, "broadcast", tensors, tensors, std::move(work), {}}, options.asyncOp);
}

Backend::WorkHandle Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = the_one(tensors, "all_reduce");
  if (tensor.layout() == at::kSparse) return allreduce_sparse(tensors, options);
  auto work = translated([&] {
    return group_.all_reduce(view_of(tensor), reduction_of(options.reduceOp), call_options(options.timeout));
  });
  return started({OpType::ALLREDUCE, "all_reduce", tensors, tensors, std::move(work), {}}, options.asyncOp);
}

Backend::WorkHandle Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = the_one(tensors, "all_reduce");
  TORCH_CHECK_VALUE(options.reduceOp.op_ == c10d::ReduceOp::SUM, "chorale: sparse tensors can only be summed");
  const at::Tensor coalesced = tensor.coalesce();
  const auto sum = translated([&] {
    const chorale::Shape sizes(tensor.sizes().begin(), tensor.sizes().end());
    return group_.sparse_all_reduce(chorale::Tensor::sparse_coo(view_of(coalesced.indices().contiguous()),
                                                                view_of(coalesced.values().contiguous()), sizes, true),
                                    call_options(options.timeout));
  });
  const auto copied = [](const chorale::Tensor& part, at::ScalarType type) {
    const auto& sizes = part.sizes();
    at::Tensor copy = at::empty(std::vector<int64_t>(sizes.begin(), sizes.end()), at::TensorOptions().dtype(type));
    if (copy.nbytes() > 0) std::memcpy(copy.data_ptr(), part.raw(), copy.nbytes());
    return copy;
  };
  at::Tensor result = at::sparse_coo_tensor(copied(sum.sparse().indices, at::kLong),
                                            copied(sum.sparse().values, tensor.scalar_type()), tensor.sizes());
  tensor.copy_(result._coalesced_(true));
  return started({OpType::_ALLREDUCE_SPARSE, "sparse_all_reduce", {}, tensors, {}, {}}, false);
}

Backend::WorkHandle Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto work = translated([&] {
    return group_.all_reduce_coalesced(views_of(tensors), reduction_of(options.reduceOp),
                                       call_options(options.timeout));
  });
  return started({OpType::ALLREDUCE_COALESCED, "all_reduce", tensors, tensors, std::move(work), {}}, options.asyncOp);
}

Backend::WorkHandle Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = the_one(tensors, "reduce");
  auto work = translated([&] {
    return group_.reduce(view_of(tensor), static_cast<int>(options.rootRank), reduction_of(options.reduceOp),
                         call_options(options.timeout));
  });
  return started({OpType::REDUCE, "reduce", tensors, tensors, std::move(work), {}}, options.asyncOp);
}

Backend::WorkHandle Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) {
  const at::Tensor& input = the_one(inputs, "all_gather");
  TORCH_CHECK_VALUE(outputs.size() == 1, "chorale: all_gather takes one list of outputs, not ", outputs.size());
  auto work = translated([&] {
    return group_.all_gather(views_of(outputs[0], true), view_of(input, true), call_options(options.timeout));
  });
  return started({OpType::ALLGATHER, "all_gather", inputs, outputs[0], std::move(work), {}}, options.asyncOp);
}

Backend::WorkHandle Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::AllgatherOptions& options) {
  auto work = translated([&] {
    return group_.all_gather_into(view_of(output, true), view_of(input, true), call_options(options.timeout));
  });
  return started({OpType::_ALLGATHER_BASE, "_all_gather_base", {input}, {output}, std::move(work), {}},
                 options.asyncOp);
}

Backend::WorkHandle Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& options) {
  // PyTorch's outputs are one list per rank, ours one list per input.
  Tensors results;
  auto work = translated([&] {
    std::vector<chorale::comm::Work> works;
    for (size_t i = 0; i < inputs.size(); ++i) {
      std::vector<chorale::Tensor> views;
      for (const Tensors& of_rank : outputs) {
        TORCH_CHECK_VALUE(of_rank.size() == inputs.size(), "chorale: all_gather_coalesced: a list of outputs has ",
                          of_rank.size(), " tensors where there are ", inputs.size(), " inputs");
        views.push_back(view_of(of_rank[i], true));
        results.push_back(of_rank[i]);
      }
      works.push_back(group_.all_gather(views, view_of(inputs[i], true), call_options(options.timeout)));
    }
    return joined(works);
  });
  return started({OpType::ALLGATHER_COALESCED, "all_gather", inputs, std::move(results), std::move(work), {}},
                 options.asyncOp);
}

Backend::WorkHandle Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                             const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "chorale: ", outputs.size(), " outputs for ", inputs.size(),
                    " inputs");
  auto work = translated([&] {
    std::vector<chorale::comm::Work> works;
    for (size_t i = 0; i < inputs.size(); ++i)
      works.push_back(
          group_.all_gather_into(view_of(outputs[i], true), view_of(inputs[i], true), call_options(options.timeout)));
    return joined(works);
  });
  return started({OpType::ALLGATHER_INTO_TENSOR_COALESCED, "_all_gather_base", inputs, outputs, std::move(work), {}},
                 options.asyncOp);
}

Backend::WorkHandle Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::GatherOptions& options) {
  const at::Tensor& input = the_one(inputs, "gather");
  const bool is_root = options.rootRank == getRank();
  TORCH_CHECK_VALUE(outputs.size() == (is_root ? 1u : 0u), "chorale: gather: the root passes a list of outputs, the ",
                    "others none; rank ", getRank(), " passed ", outputs.size());
  const Tensors results = is_root ? outputs[0] : Tensors{};
  auto work = translated([&] {
    return group_.gather(views_of(results, true), view_of(input, true), static_cast<int>(options.rootRank),
                         call_options(options.timeout));
  });
  return started({OpType::GATHER, "gather", inputs, results, std::move(work), {}}, options.asyncOp);
}

Backend::WorkHandle Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ScatterOptions& options) {
  const at::Tensor& output = the_one(outputs, "scatter");
  const bool is_root = options.rootRank == getRank();
  TORCH_CHECK_VALUE(inputs.size() == (is_root ? 1u : 0u), "chorale: scatter: the root passes a list of inputs, the ",
                    "others none; rank ", getRank(), " passed ", inputs.size());
  const Tensors given = is_root ? inputs[0] : Tensors{};
  auto work = translated([&] {
    return group_.scatter(view_of(output, true), views_of(given, true), static_cast<int>(options.rootRank),
                          call_options(options.timeout));
  });
  return started({OpType::SCATTER, "scatter", given, outputs, std::move(work), {}}, options.asyncOp);
}

Backend::WorkHandle Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = the_one(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1, "chorale: reduce_scatter takes one list of inputs, not ", inputs.size());
  auto work = translated([&] {
    return group_.reduce_scatter(view_of(output), views_of(inputs[0]), reduction_of(options.reduceOp),
                                 call_options(options.timeout));
  });
  return started({OpType::REDUCE_SCATTER, "reduce_scatter", inputs[0], outputs, std::move(work), {}}, options.asyncOp);
}

Backend::WorkHandle Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::ReduceScatterOptions& options) {
  auto work = translated([&] {
    return group_.reduce_scatter_from(view_of(output), view_of(input), reduction_of(options.reduceOp),
                                      call_options(options.timeout));
  });
  return started({OpType::_REDUCE_SCATTER_BASE, "_reduce_scatter_base", {input}, {output}, std::move(work), {}},
                 options.asyncOp);
}

Backend::WorkHandle Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                             const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "chorale: ", outputs.size(), " outputs for ", inputs.size(),
                    " inputs");
  auto work = translated([&] {
    std::vector<chorale::comm::Work> works;
    for (size_t i = 0; i < inputs.size(); ++i)
      works.push_back(group_.reduce_scatter_from(view_of(outputs[i]), view_of(inputs[i]),
                                                 reduction_of(options.reduceOp), call_options(options.timeout)));
    return joined(works);
  });
  return started(
      {OpType::REDUCE_SCATTER_TENSOR_COALESCED, "_reduce_scatter_base", inputs, outputs, std::move(work), {}},
      options.asyncOp);
}

Backend::WorkHandle Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                           std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  auto work = translated([&] {
    return group_.all_to_all_single(view_of(output), view_of(input), output_splits, input_splits,
                                    call_options(options.timeout));
  });
  return started({OpType::ALLTOALL_BASE, "all_to_all", {input}, {output}, std::move(work), {}}, options.asyncOp);
}

Backend::WorkHandle Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  auto work = translated([&] {
    return group_.all_to_all(views_of(outputs, true), views_of(inputs, true), call_options(options.timeout));
  });
  return started({OpType::ALLTOALL, "all_to_all", inputs, outputs, std::move(work), {}}, options.asyncOp);
}

Backend::WorkHandle Backend::send(Tensors& tensors, int destination, int tag) {
  const at::Tensor& tensor = the_one(tensors, "send");
  auto work = translated(
      [&] { return group_.isend(view_of(tensor, true), destination, static_cast<uint64_t>(tag), call_options({})); });
  return started({OpType::SEND, "send", tensors, tensors, std::move(work), {}}, true);
}

Backend::WorkHandle Backend::recv(Tensors& tensors, int source, int tag) {
  const at::Tensor& tensor = the_one(tensors, "recv");
  auto work = translated(
      [&] { return group_.irecv(view_of(tensor, true), source, static_cast<uint64_t>(tag), call_options({})); });
  return started({OpType::RECV, "recv", tensors, tensors, std::move(work), {}}, true);
}

Backend::WorkHandle Backend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor& tensor = the_one(tensors, "recv");
  auto work = translated([&] {
    return group_.irecv(view_of(tensor, true), chorale::comm::kAnySource, static_cast<uint64_t>(tag), call_options({}));
  });
  return started({OpType::RECVANYSOURCE, "recvAnySource", tensors, tensors, std::move(work), {}}, true);
}

Backend::WorkHandle Backend::barrier(const c10d::BarrierOptions& options) {
  auto work = translated([&] { return group_.barrier(call_options(options.timeout)); });
  return started({OpType::BARRIER, "barrier", {}, {}, std::move(work), {}}, options.asyncOp);
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) {
  translated([&] {
    group_.monitored_barrier(*call_options(options.timeout).timeout, wait_for_all);
    return 0;
  });
}

}  // namespace chorale_torch
