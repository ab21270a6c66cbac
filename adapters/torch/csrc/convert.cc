#include "convert.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/error.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>

#include "chorale/base/comm_error.h"

namespace chorale_torch {
namespace {

using chorale::DType;

std::optional<DType> known_dtype(at::ScalarType type) {
  switch (type) {
    case at::kBool:
      return DType::kBool;
    case at::kByte:
      return DType::kU8;
    case at::kChar:
      return DType::kI8;
    case at::kShort:
      return DType::kI16;
    case at::kInt:
      return DType::kI32;
    case at::kLong:
      return DType::kI64;
    case at::kHalf:
      return DType::kF16;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kFloat:
      return DType::kF32;
    case at::kDouble:
      return DType::kF64;
    case at::kComplexFloat:
      return DType::kC64;
    case at::kComplexDouble:
      return DType::kC128;
    default:
      return std::nullopt;
  }
}

at::ScalarType scalar_type_of(DType dtype) {
  for (const at::ScalarType type : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf,
                                    at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    if (known_dtype(type) == dtype) return type;
  }
  TORCH_CHECK(false, "chorale: no type of PyTorch's for ", static_cast<int>(dtype));
}

DType dtype_of_size(size_t bytes) {
  switch (bytes) {
    case 1:
      return DType::kU8;
    case 2:
      return DType::kI16;
    case 4:
      return DType::kI32;
    case 8:
      return DType::kI64;
    default:
      TORCH_CHECK(bytes == 16, "chorale: elements of ", bytes, " bytes");
      return DType::kC128;
  }
}

}  // namespace

chorale::Tensor view_of(const at::Tensor& tensor, bool only_moved) {
  TORCH_CHECK(tensor.defined(), "chorale: a tensor is undefined");
  TORCH_CHECK(tensor.device().is_cpu(), "chorale: tensors must be on the CPU, not on ", tensor.device(),
              "; for GPUs use \"cpu:chorale,cuda:nccl\"");
  TORCH_CHECK(tensor.layout() == at::kStrided,
              "chorale: only dense tensors can be sent; all-reduce takes sparse ones too");
  auto dtype = known_dtype(tensor.scalar_type());
  if (!dtype) {
    TORCH_CHECK(only_moved, "chorale: ", tensor.scalar_type(),
                " cannot be reduced; it can be sent, gathered and scattered");
    dtype = dtype_of_size(tensor.element_size());
  }
  // The stretch that the view touches: strides of a PyTorch tensor are never negative.
  int64_t last = tensor.numel() == 0 ? -1 : 0;
  for (int64_t d = 0; d < tensor.dim() && last >= 0; ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  chorale::Shape sizes(tensor.sizes().begin(), tensor.sizes().end());
  chorale::Strides strides(tensor.strides().begin(), tensor.strides().end());
  const size_t bytes = static_cast<size_t>(last + 1) * tensor.element_size();
  auto storage = chorale::Storage::wrap(tensor.data_ptr(), bytes, chorale::kCpu, [tensor] {});
  return chorale::Tensor::on(std::move(storage), sizes, strides, 0, *dtype);
}

std::vector<chorale::Tensor> views_of(const std::vector<at::Tensor>& tensors, bool only_moved) {
  std::vector<chorale::Tensor> views;
  views.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) views.push_back(view_of(tensor, only_moved));
  return views;
}

chorale::Tensor sparse_view_of(const at::Tensor& coalesced) {
  const chorale::Shape sizes(coalesced.sizes().begin(), coalesced.sizes().end());
  return chorale::Tensor::sparse_coo(view_of(coalesced.indices().contiguous()),
                                     view_of(coalesced.values().contiguous()), sizes, true);
}

at::Tensor tensor_of(const chorale::Tensor& tensor) {
  const std::vector<int64_t> sizes(tensor.sizes().begin(), tensor.sizes().end());
  if (tensor.is_sparse()) {
    const auto& parts = tensor.sparse();
    return at::sparse_coo_tensor(tensor_of(parts.indices), tensor_of(parts.values), sizes)._coalesced_(parts.coalesced);
  }
  const std::vector<int64_t> strides(tensor.strides().begin(), tensor.strides().end());
  return at::from_blob(
      tensor.raw(), sizes, strides, [tensor](void*) {}, at::TensorOptions().dtype(scalar_type_of(tensor.dtype())));
}

chorale::comm::Reduction reduction_of(const c10d::ReduceOp& op) {
  using chorale::Reduce;
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return Reduce::kSum;
    case c10d::ReduceOp::AVG:
      return Reduce::kAverage;
    case c10d::ReduceOp::PRODUCT:
      return Reduce::kProduct;
    case c10d::ReduceOp::MIN:
      return Reduce::kMin;
    case c10d::ReduceOp::MAX:
      return Reduce::kMax;
    case c10d::ReduceOp::BAND:
      return Reduce::kBitAnd;
    case c10d::ReduceOp::BOR:
      return Reduce::kBitOr;
    case c10d::ReduceOp::BXOR:
      return Reduce::kBitXor;
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto* supplement = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
      TORCH_CHECK(supplement, "chorale: PREMUL_SUM without its factor");
      return chorale::comm::premultiplied_sum(
          supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor);
    }
    default:
      TORCH_CHECK(false, "chorale: unknown reduction ", static_cast<int>(op.op_));
  }
}

void rethrow_as_torch() {
  try {
    throw;
  } catch (const chorale::InvalidArgument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  } catch (const chorale::CommError& error) {
    std::string text = error.what();
    if (text.find("timed out") != std::string::npos) text += "; the timeout is the group's unless the call has its own";
    C10_THROW_ERROR(DistBackendError, text);
  } catch (const chorale::Error& error) {
    TORCH_CHECK(false, error.what());
  }
}

// ---- the store

namespace {
std::vector<uint8_t> bytes_of(std::string_view text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
}  // namespace

void BorrowedStore::set(std::string_view key, std::string_view value, chorale::Deadline) {
  store_->set(std::string(key), bytes_of(value));
}
std::string BorrowedStore::get(std::string_view key, chorale::Deadline deadline) {
  wait(std::array{std::string(key)}, deadline);
  return text_of(store_->get(std::string(key)));
}
// A meeting waits often and for a short time. PyTorch's own wait puts a warning into the log whenever its time is over.
void BorrowedStore::wait(std::span<const std::string> names, chorale::Deadline deadline) {
  using namespace std::chrono_literals;
  const std::vector<std::string> keys(names.begin(), names.end());
  for (chorale::Deadline::Clock::duration pause = 200us; !store_->check(keys);
       pause = std::min<chorale::Deadline::Clock::duration>(2 * pause, 20ms)) {
    if (deadline.passed())
      throw chorale::CommError(chorale::concat("[store] nobody has set ", keys.front(), " in time"));
    std::this_thread::sleep_for(std::min(pause, deadline.left()));
  }
}
bool BorrowedStore::contains(std::string_view key, chorale::Deadline) { return store_->check({std::string(key)}); }
int64_t BorrowedStore::add(std::string_view key, int64_t delta, chorale::Deadline) {
  return store_->add(std::string(key), delta);
}
std::string BorrowedStore::compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                                       chorale::Deadline) {
  return text_of(store_->compareSet(std::string(key), bytes_of(expected), bytes_of(desired)));
}
bool BorrowedStore::remove(std::string_view key, chorale::Deadline) { return store_->deleteKey(std::string(key)); }
std::vector<std::string> BorrowedStore::keys(std::string_view, chorale::Deadline) {
  throw chorale::StateError("[store] PyTorch's stores cannot be listed");
}
int64_t BorrowedStore::count(chorale::Deadline) { return store_->getNumKeys(); }

}  // namespace chorale_torch
