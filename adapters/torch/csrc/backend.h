// The backend "chorale" of torch.distributed: our groups behind PyTorch's interface.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "chorale/comm/group.h"
#include "work.h"

namespace chorale_torch {

class Backend final : public c10d::Backend {
 public:
  // `members` are the global ranks of a subgroup, by which errors name them; empty for the whole job.
  Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout,
          std::vector<int> members);
  ~Backend() override;

  const std::string getBackendName() const override { return "chorale"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  // A group of some ranks of this one; null for the others.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  // What destroy_process_group() calls: leaves together with the others, or tells that this rank has left a call out.
  void shutdown() override;
  uint64_t getSequenceNumberForGroup() override;
  void setSequenceNumberForGroup() override {}

  using Tensors = std::vector<at::Tensor>;
  using WorkHandle = c10::intrusive_ptr<c10d::Work>;

  WorkHandle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkHandle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkHandle allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkHandle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkHandle reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkHandle allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkHandle all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkHandle allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& options) override;
  WorkHandle all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& options) override;
  WorkHandle gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkHandle gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& options) override;
  WorkHandle scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkHandle reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                            const c10d::ReduceScatterOptions& options) override;
  WorkHandle reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override;
  WorkHandle reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                             const c10d::ReduceScatterOptions& options) override;
  WorkHandle all_to_all_single(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                               std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkHandle alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkHandle send(Tensors& tensors, int destination, int tag) override;
  WorkHandle recv(Tensors& tensors, int source, int tag) override;
  WorkHandle recvAnysource(Tensors& tensors, int tag) override;
  WorkHandle barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) override;

 private:
  chorale::comm::CallOptions call_options(std::chrono::milliseconds timeout) const;
  // What ranks compute for `op` on tensors of this type: an average of integers is a sum, which the work divides.
  static chorale::comm::Reduction reduction(const c10d::ReduceOp& op, const at::Tensor& tensor);
  Work::Parts averaging(const c10d::ReduceOp& op, Work::Parts parts) const;
  // Wraps a call; `async`: nobody may ever wait for it.
  WorkHandle started(Work::Parts parts, bool async);
  uint64_t number() const;
  int global(int64_t rank) const { return group_.global_rank(static_cast<int>(rank)); }

  chorale::comm::Group group_;
  std::chrono::milliseconds timeout_;
  bool collecting_ = false;
  chorale::comm::Operations collected_;
  Tensors collected_results_, collected_sums_;
  Mover mover_;  // ends first: it uses the group
};

}  // namespace chorale_torch
