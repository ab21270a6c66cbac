// PyTorch's tensors, reductions, stores and errors as ours.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "chorale/comm/call.h"
#include "chorale/tensor/tensor.h"
#include "chorale/transport/store/store.h"

namespace chorale_torch {

// A view of the same memory, which keeps the tensor alive. Dense tensors on the CPU only. A type that we do not know
// becomes one of its size where values are only moved (`only_moved`), and is an error elsewhere.
chorale::Tensor view_of(const at::Tensor& tensor, bool only_moved = false);
std::vector<chorale::Tensor> views_of(const std::vector<at::Tensor>& tensors, bool only_moved = false);

// The same of a coalesced sparse tensor; its parts are copied where they are not contiguous.
chorale::Tensor sparse_view_of(const at::Tensor& coalesced);
// The way back: the same memory, dense or sparse, as a tensor of PyTorch's.
at::Tensor tensor_of(const chorale::Tensor& tensor);

chorale::comm::Reduction reduction_of(const c10d::ReduceOp& op);

// Our store's interface over one of PyTorch's, as far as meeting needs it.
class BorrowedStore final : public chorale::transport::Store {
 public:
  explicit BorrowedStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(std::string_view key, std::string_view value, chorale::Deadline deadline) override;
  std::string get(std::string_view key, chorale::Deadline deadline) override;
  void wait(std::span<const std::string> keys, chorale::Deadline deadline) override;
  bool contains(std::string_view key, chorale::Deadline deadline) override;
  int64_t add(std::string_view key, int64_t delta, chorale::Deadline deadline) override;
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          chorale::Deadline deadline) override;
  bool remove(std::string_view key, chorale::Deadline deadline) override;
  std::vector<std::string> keys(std::string_view prefix, chorale::Deadline deadline) override;
  int64_t count(chorale::Deadline deadline) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

// Runs `body`; our errors become PyTorch's: bad arguments ValueError, failed communication DistBackendError, others
// RuntimeError.
[[noreturn]] void rethrow_as_torch();
template <class Body>
auto translated(const Body& body) {
  try {
    return body();
  } catch (const chorale::Error&) {
    rethrow_as_torch();
  }
}

}  // namespace chorale_torch
