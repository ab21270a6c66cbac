#include "chorale/tensor/dlpack.h"

#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "chorale/base/error.h"

namespace chorale {
namespace dlpack {
namespace {

struct Code {
  DLDataTypeCode code;
  uint8_t bits;
};
// The entries are in the order of DType.
constexpr std::array<Code, kDTypeCount> kCodes = {{{kDLBool, 8},
                                                   {kDLUInt, 8},
                                                   {kDLInt, 8},
                                                   {kDLInt, 16},
                                                   {kDLInt, 32},
                                                   {kDLInt, 64},
                                                   {kDLFloat, 16},
                                                   {kDLBfloat, 16},
                                                   {kDLFloat, 32},
                                                   {kDLFloat, 64},
                                                   {kDLComplex, 64},
                                                   {kDLComplex, 128}}};

DType dtype_of_code(DLDataType given) {
  CHORALE_CHECK(given.lanes == 1, "[from_dlpack] elements with ", given.lanes, " lanes; only 1 is supported");
  for (const DType dtype : kAllDTypes) {
    const Code& code = kCodes[static_cast<size_t>(dtype)];
    if (code.code == given.code && code.bits == given.bits) return dtype;
  }
  throw InvalidArgument(concat("[from_dlpack] elements of type code ", static_cast<int>(given.code), " with ",
                               static_cast<int>(given.bits), " bits have no dtype here"));
}

// What an exported tensor needs as long as the other library holds it.
struct Exported {
  DLManagedTensorVersioned managed{};
  Tensor tensor;
  Shape sizes;
  Strides strides;
};

// Owns what was handed to us until a storage does.
struct Deleter {
  void operator()(DLManagedTensorVersioned* managed) const {
    if (managed->deleter) managed->deleter(managed);
  }
};
using Owned = std::unique_ptr<DLManagedTensorVersioned, Deleter>;

}  // namespace
}  // namespace dlpack

using namespace dlpack;

DLManagedTensorVersioned* to_dlpack(const Tensor& tensor) {
  CHORALE_CHECK(tensor.defined(), "[to_dlpack] the tensor is undefined");
  CHORALE_CHECK(!tensor.is_sparse(), "[to_dlpack] a sparse tensor of shape ", tensor.sizes(),
                " has no dense elements; export its parts, or make it dense first");
  CHORALE_CHECK(tensor.device() == kCpu, "[to_dlpack] a tensor on device ", tensor.device(), " has no bytes to show");
  // Another handle without autograd's record: the other library holds bytes, not a graph.
  auto* exported = new Exported{{}, tensor.alias(), tensor.sizes(), tensor.strides()};
  const Code code = kCodes[static_cast<size_t>(tensor.dtype())];
  exported->managed = {
      .version = {1, 0},
      .manager_ctx = exported,
      .deleter = [](DLManagedTensorVersioned* self) { delete static_cast<Exported*>(self->manager_ctx); },
      .flags = tensor.storage()->read_only() ? kReadOnly : 0,
      .dl_tensor = {.data = tensor.raw(),
                    .device = {kDLCPU, 0},
                    .ndim = static_cast<int32_t>(tensor.dims()),
                    .dtype = {code.code, code.bits, 1},
                    .shape = exported->sizes.data(),
                    .strides = exported->strides.data(),
                    .byte_offset = 0},
  };
  return &exported->managed;
}

Tensor from_dlpack(DLManagedTensorVersioned* managed) {
  CHORALE_CHECK(managed, "[from_dlpack] needs a tensor, not a null pointer");
  Owned owned(managed);
  // With another major version only version, context and deleter may be read.
  CHORALE_CHECK(managed->version.major == 1, "[from_dlpack] understands version 1 of DLPack, not ",
                managed->version.major, ".", managed->version.minor);
  const DLTensor& given = managed->dl_tensor;
  CHORALE_CHECK(given.device.device_type == kDLCPU,
                "[from_dlpack] takes tensors of the CPU (device type 1), not of type ", given.device.device_type,
                "; move it first");
  const DType dtype = dtype_of_code(given.dtype);
  CHORALE_CHECK(given.ndim >= 0 && given.ndim <= static_cast<int32_t>(kMaxDims), "[from_dlpack] a tensor has at most ",
                kMaxDims, " dimensions, not ", given.ndim);
  const auto dims = static_cast<size_t>(given.ndim);
  CHORALE_CHECK(dims == 0 || given.shape, "[from_dlpack] ", dims, " dimensions but no shape");
  const Shape sizes(given.shape, given.shape + dims);
  const int64_t elems = count_elems(sizes);
  const Strides strides = given.strides ? Strides(given.strides, given.strides + dims) : contiguous_strides(sizes);
  CHORALE_CHECK(elems == 0 || given.data, "[from_dlpack] shape ", sizes, " but no data");

  // The storage begins at the lowest element, which is not the first where a stride is negative.
  const std::optional<memory::Reach> reach = reach_of(sizes, strides);
  CHORALE_CHECK(reach, "[from_dlpack] sizes ", sizes, " with strides ", strides, " reach further than can be counted");
  const auto bytes = static_cast<int64_t>(size_of(dtype));
  std::byte* lowest = nullptr;
  if (elems > 0) lowest = static_cast<std::byte*>(given.data) + given.byte_offset + reach->low * bytes;
  const Access access = managed->flags & kReadOnly ? Access::kReadOnly : Access::kReadWrite;
  auto storage = Storage::wrap(
      lowest, static_cast<size_t>((reach->high - reach->low) * bytes), kCpu, [managed] { Deleter{}(managed); }, access);
  static_cast<void>(owned.release());  // the storage's now
  return Tensor::on(std::move(storage), sizes, strides, -reach->low, dtype);
}

}  // namespace chorale
