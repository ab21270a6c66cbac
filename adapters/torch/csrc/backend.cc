#include "backend.h"

#include <algorithm>
#include <atomic>
#include <regex>

#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/comm/leaving.h"
#include "convert.h"

namespace chorale_torch {
namespace {

using c10d::OpType;
using chorale::comm::Operations;

// The words of the profiler: "chorale:all_reduce". PyTorch's own tests look for another backend's name.
std::string title(const char* call) {
  return chorale::config::env("CHORALE_TORCH_PROFILE_AS").value_or("chorale") + ":" + call;
}
const struct Titles {
  std::string broadcast = title("broadcast"), all_reduce = title("all_reduce"),
              sparse_all_reduce = title("sparse_all_reduce"), reduce = title("reduce"),
              all_gather = title("all_gather"), all_gather_into = title("_all_gather_base"), gather = title("gather"),
              scatter = title("scatter"), reduce_scatter = title("reduce_scatter"),
              reduce_scatter_from = title("_reduce_scatter_base"), all_to_all = title("all_to_all"),
              send = title("send"), recv = title("recv"), recv_any_source = title("recvAnySource"),
              barrier = title("barrier"), coalesced = title("coalesced");
} titles;

const at::Tensor& the_one(const std::vector<at::Tensor>& tensors, const char* call) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "chorale: ", call, " takes one tensor, not ", tensors.size());
  return tensors[0];
}

constexpr size_t kSmallBytes = 64 << 10;
constexpr std::chrono::microseconds kSoon{30};
size_t bytes_of(const std::vector<at::Tensor>& tensors) {
  size_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += tensor.is_sparse() ? 0 : tensor.nbytes();
  return bytes;
}

bool is_integer_average(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  return op.op_ == c10d::ReduceOp::AVG && at::isIntegralType(tensor.scalar_type(), false);
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

Backend::Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout,
                 std::vector<int> members)
    : c10d::Backend(rank, size), timeout_(timeout) {
  // Ranks in another order than the job's (new_group(sort_ranks=False)) keep the group's numbers.
  if (!std::is_sorted(members.begin(), members.end())) members.clear();
  translated([&] {
    BorrowedStore meeting(store);
    group_ = chorale::comm::Group::connect(meeting, "torch", rank, size,
                                           {.timeout = timeout, .members = std::move(members)});
  });
}

Backend::~Backend() = default;

void Backend::shutdown() {
  // A program may have many groups: where the others stay in one, they are not waited for in the next.
  static std::atomic<bool> others_stay{false};
  translated([&] {
    if (!leave(group_, others_stay ? std::optional(std::chrono::milliseconds(0)) : std::nullopt)) others_stay = true;
  });
}

uint64_t Backend::number() const { return static_cast<uint64_t>(group_.sequence_number()); }
uint64_t Backend::getSequenceNumberForGroup() { return number(); }

c10::intrusive_ptr<Backend::Options> Backend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>(getBackendName(), timeout_);
  for (int rank = 0; rank < getSize(); ++rank)
    options->global_ranks_in_group.push_back(static_cast<uint64_t>(global(rank)));
  return options;
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<Options>& options) {
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  if (mine == ranks.end()) return nullptr;
  std::vector<int> members;
  members.reserve(ranks.size());
  for (const int rank : ranks) members.push_back(global(rank));
  auto part = c10::make_intrusive<Backend>(store->clone(), static_cast<int>(mine - ranks.begin()),
                                           static_cast<int>(ranks.size()), options ? options->timeout : timeout_,
                                           std::move(members));
  if (options) part->setGroupUid(options->group_name);
  return part;
}

chorale::comm::Reduction Backend::reduction(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  return is_integer_average(op, tensor) ? chorale::comm::Reduction(chorale::Reduce::kSum) : reduction_of(op);
}

Work::Parts Backend::averaging(const c10d::ReduceOp& op, Work::Parts parts) const {
  for (const at::Tensor& result : parts.results) {
    if (is_integer_average(op, result)) parts.sums.push_back(result);
  }
  parts.ranks = getSize();
  return parts;
}

chorale::comm::CallOptions Backend::call_options(std::chrono::milliseconds timeout) const {
  chorale::comm::CallOptions options;
  options.timeout = timeout == c10d::kUnsetTimeout ? timeout_ : timeout;
  return options;
}

Backend::WorkHandle Backend::started(Work::Parts parts, bool async) {
  if (collecting_) {  // what endCoalescing returns is waited for, or moved
    for (const auto& operation : parts.work.operations()) collected_.push_back(operation);
    collected_results_.insert(collected_results_.end(), parts.results.begin(), parts.results.end());
    collected_sums_.insert(collected_sums_.end(), parts.sums.begin(), parts.sums.end());
    parts.sums.clear();
    async = false;
  }
  // A small collective is done before a thread has woken up, if the others come soon.
  const bool core_each = group_.engine()->context().core_each;
  const bool soon = async && core_each && bytes_of(parts.results) <= kSmallBytes && parts.type != OpType::RECV &&
                    parts.type != OpType::RECVANYSOURCE;
  auto work = c10::make_intrusive<Work>(getRank(), number(), std::move(parts));
  if (async && !(soon && work->completes_within(kSoon))) mover_.add(work, core_each);
  return work;
}

void Backend::startCoalescing() {
  collecting_ = true;
  collected_.clear();
  collected_results_.clear();
  collected_sums_.clear();
}

Backend::WorkHandle Backend::endCoalescing() {
  collecting_ = false;
  Work::Parts parts;
  parts.type = OpType::COALESCED;
  parts.title = titles.coalesced.c_str();
  parts.results = std::move(collected_results_);
  parts.sums = std::exchange(collected_sums_, {});
  parts.ranks = getSize();
  parts.work = chorale::comm::Work(group_.engine(), std::exchange(collected_, {}));
  return started(std::move(parts), true);
}

Backend::WorkHandle Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = the_one(tensors, "broadcast");
  auto work = translated(
      [&] { return group_.broadcast(view_of(tensor, true), global(options.rootRank), call_options(options.timeout)); });
  return started({OpType::BROADCAST, titles.broadcast.c_str(), tensors, tensors, std::move(work)}, options.asyncOp);
}

Backend::WorkHandle Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = the_one(tensors, "all_reduce");
  if (tensor.layout() == at::kSparse) return allreduce_sparse(tensors, options);
  auto work = translated([&] {
    return group_.all_reduce(view_of(tensor), reduction(options.reduceOp, tensor), call_options(options.timeout));
  });
  return started(
      averaging(options.reduceOp, {OpType::ALLREDUCE, titles.all_reduce.c_str(), tensors, tensors, std::move(work)}),
      options.asyncOp);
}

Backend::WorkHandle Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = the_one(tensors, "all_reduce");
  TORCH_CHECK_VALUE(options.reduceOp.op_ == c10d::ReduceOp::SUM, "chorale: sparse tensors can only be summed");
  const auto sum = translated(
      [&] { return group_.sparse_all_reduce(sparse_view_of(tensor.coalesce()), call_options(options.timeout)); });
  tensor.copy_(tensor_of(sum));
  auto work = started({OpType::_ALLREDUCE_SPARSE, titles.sparse_all_reduce.c_str(), {}, tensors, {}}, false);
  work->isCompleted();  // a holder of its future may never wait for the work
  return work;
}

Backend::WorkHandle Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto work = translated([&] {
    const bool integers = !tensors.empty() && is_integer_average(options.reduceOp, tensors[0]);
    return group_.all_reduce_coalesced(
        views_of(tensors), integers ? chorale::comm::Reduction(chorale::Reduce::kSum) : reduction_of(options.reduceOp),
        call_options(options.timeout));
  });
  return started(averaging(options.reduceOp,
                           {OpType::ALLREDUCE_COALESCED, titles.all_reduce.c_str(), tensors, tensors, std::move(work)}),
                 options.asyncOp);
}

Backend::WorkHandle Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = the_one(tensors, "reduce");
  auto work = translated([&] {
    return group_.reduce(view_of(tensor), global(options.rootRank), reduction(options.reduceOp, tensor),
                         call_options(options.timeout));
  });
  Work::Parts parts{OpType::REDUCE, titles.reduce.c_str(), tensors, tensors, std::move(work)};
  if (options.rootRank == getRank()) parts = averaging(options.reduceOp, std::move(parts));
  return started(std::move(parts), options.asyncOp);
}

Backend::WorkHandle Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) {
  const at::Tensor& input = the_one(inputs, "all_gather");
  TORCH_CHECK_VALUE(outputs.size() == 1, "chorale: all_gather takes one list of outputs, not ", outputs.size());
  auto work = translated([&] {
    return group_.all_gather(views_of(outputs[0], true), view_of(input, true), call_options(options.timeout));
  });
  return started({OpType::ALLGATHER, titles.all_gather.c_str(), inputs, outputs[0], std::move(work)}, options.asyncOp);
}

Backend::WorkHandle Backend::all_gather_single(at::Tensor& output, at::Tensor& input,
                                               const c10d::AllgatherOptions& options) {
  auto work = translated([&] {
    return group_.all_gather_into(view_of(output, true), view_of(input, true), call_options(options.timeout));
  });
  return started({OpType::_ALLGATHER_BASE, titles.all_gather_into.c_str(), {input}, {output}, std::move(work)},
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
  return started({OpType::ALLGATHER_COALESCED, titles.all_gather.c_str(), inputs, std::move(results), std::move(work)},
                 options.asyncOp);
}

Backend::WorkHandle Backend::all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
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
  return started(
      {OpType::ALLGATHER_INTO_TENSOR_COALESCED, titles.all_gather_into.c_str(), inputs, outputs, std::move(work)},
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
    return group_.gather(views_of(results, true), view_of(input, true), global(options.rootRank),
                         call_options(options.timeout));
  });
  return started({OpType::GATHER, titles.gather.c_str(), inputs, results, std::move(work)}, options.asyncOp);
}

Backend::WorkHandle Backend::gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& options) {
  std::vector<Tensors> parts;
  if (options.rootRank == getRank()) {
    TORCH_CHECK_VALUE(output.numel() == input.numel() * getSize(), "chorale: gather_single: the output has ",
                      output.numel(), " elements where ", getSize(), " ranks give ", input.numel(), " each");
    parts.push_back(output.view({getSize(), -1}).unbind());
  }
  Tensors inputs{input.flatten()};
  return gather(parts, inputs, options);
}

Backend::WorkHandle Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ScatterOptions& options) {
  const at::Tensor& output = the_one(outputs, "scatter");
  const bool is_root = options.rootRank == getRank();
  TORCH_CHECK_VALUE(inputs.size() == (is_root ? 1u : 0u), "chorale: scatter: the root passes a list of inputs, the ",
                    "others none; rank ", getRank(), " passed ", inputs.size());
  const Tensors given = is_root ? inputs[0] : Tensors{};
  auto work = translated([&] {
    return group_.scatter(view_of(output, true), views_of(given, true), global(options.rootRank),
                          call_options(options.timeout));
  });
  return started({OpType::SCATTER, titles.scatter.c_str(), given, outputs, std::move(work)}, options.asyncOp);
}

Backend::WorkHandle Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = the_one(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1, "chorale: reduce_scatter takes one list of inputs, not ", inputs.size());
  auto work = translated([&] {
    return group_.reduce_scatter(view_of(output), views_of(inputs[0]), reduction(options.reduceOp, output),
                                 call_options(options.timeout));
  });
  return started(averaging(options.reduceOp, {OpType::REDUCE_SCATTER, titles.reduce_scatter.c_str(), inputs[0], outputs,
                                              std::move(work)}),
                 options.asyncOp);
}

Backend::WorkHandle Backend::reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& options) {
  auto work = translated([&] {
    return group_.reduce_scatter_from(view_of(output), view_of(input), reduction(options.reduceOp, output),
                                      call_options(options.timeout));
  });
  return started(
      averaging(options.reduceOp,
                {OpType::_REDUCE_SCATTER_BASE, titles.reduce_scatter_from.c_str(), {input}, {output}, std::move(work)}),
      options.asyncOp);
}

Backend::WorkHandle Backend::reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                             const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "chorale: ", outputs.size(), " outputs for ", inputs.size(),
                    " inputs");
  auto work = translated([&] {
    std::vector<chorale::comm::Work> works;
    for (size_t i = 0; i < inputs.size(); ++i)
      works.push_back(group_.reduce_scatter_from(view_of(outputs[i]), view_of(inputs[i]),
                                                 reduction(options.reduceOp, outputs[i]),
                                                 call_options(options.timeout)));
    return joined(works);
  });
  return started(averaging(options.reduceOp, {OpType::REDUCE_SCATTER_TENSOR_COALESCED,
                                              titles.reduce_scatter_from.c_str(), inputs, outputs, std::move(work)}),
                 options.asyncOp);
}

Backend::WorkHandle Backend::all_to_all_single(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options) {
  auto work = translated([&] {
    return group_.all_to_all_single(view_of(output, true), view_of(input, true), output_splits, input_splits,
                                    call_options(options.timeout));
  });
  return started({OpType::ALLTOALL_BASE, titles.all_to_all.c_str(), {input}, {output}, std::move(work)},
                 options.asyncOp);
}

Backend::WorkHandle Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  auto work = translated([&] {
    return group_.all_to_all(views_of(outputs, true), views_of(inputs, true), call_options(options.timeout));
  });
  return started({OpType::ALLTOALL, titles.all_to_all.c_str(), inputs, outputs, std::move(work)}, options.asyncOp);
}

Backend::WorkHandle Backend::send(Tensors& tensors, int destination, int tag) {
  const at::Tensor& tensor = the_one(tensors, "send");
  auto work = translated([&] {
    return group_.isend(view_of(tensor, true), global(destination), static_cast<uint64_t>(tag),
                        call_options(c10d::kUnsetTimeout));
  });
  return started({OpType::SEND, titles.send.c_str(), tensors, tensors, std::move(work)}, true);
}

Backend::WorkHandle Backend::recv(Tensors& tensors, int source, int tag) {
  const at::Tensor& tensor = the_one(tensors, "recv");
  auto work = translated([&] {
    return group_.irecv(view_of(tensor, true), global(source), static_cast<uint64_t>(tag),
                        call_options(c10d::kUnsetTimeout));
  });
  return started({OpType::RECV, titles.recv.c_str(), tensors, tensors, std::move(work)}, true);
}

Backend::WorkHandle Backend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor& tensor = the_one(tensors, "recv");
  auto work = translated([&] {
    return group_.irecv(view_of(tensor, true), chorale::comm::kAnySource, static_cast<uint64_t>(tag),
                        call_options(c10d::kUnsetTimeout));
  });
  return started({OpType::RECVANYSOURCE, titles.recv_any_source.c_str(), tensors, tensors, std::move(work)}, true);
}

Backend::WorkHandle Backend::barrier(const c10d::BarrierOptions& options) {
  auto work = translated([&] { return group_.barrier(call_options(options.timeout)); });
  return started({OpType::BARRIER, titles.barrier.c_str(), {}, {}, std::move(work)}, options.asyncOp);
}

namespace {

// Programs look for PyTorch's words, which say which ranks did not come.
std::string in_words_of_torch(const chorale::CommError& error, bool at_root, int rank, int root, int64_t ms) {
  const std::string text = error.what();
  if (!at_root)
    return chorale::concat("Rank ", rank, " successfully reached monitoredBarrier, but received errors while waiting ",
                           "for send/recv from rank ", root, ": ", text);
  std::smatch absent;
  if (!std::regex_search(text, absent, std::regex("ranks? ([0-9, ]+) did not reach it")))
    return chorale::concat("Rank ", error.failure().peer, " failed to pass monitoredBarrier: ", text);
  const bool several = absent.str(1).find(',') != std::string::npos;
  return chorale::concat("Rank ", rank, " timed out in monitoredBarrier after ", ms,
                         " ms: ", several ? "Ranks " : "Rank ", absent.str(1),
                         " failed to pass monitoredBarrier: ", text);
}

}  // namespace

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) {
  const auto timeout = *call_options(options.timeout).timeout;
  translated([&] {
    try {
      group_.monitored_barrier(timeout, wait_for_all);
    } catch (const chorale::CommError& error) {
      throw chorale::CommError(in_words_of_torch(error, getRank() == 0, global(getRank()), global(0), timeout.count()),
                               error.failure());
    }
  });
}

}  // namespace chorale_torch
