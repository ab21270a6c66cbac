// Exchange of tensors with other libraries in one process, without copies: DLPack 1.x (https://dmlc.github.io/dlpack).
// The structures are declared here because they are the contract; the layout is that of the C header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "chorale/tensor/tensor.h"

namespace chorale {
namespace dlpack {

struct DLPackVersion {
  uint32_t major;
  uint32_t minor;
};

enum DLDeviceType : int32_t { kDLCPU = 1, kDLCUDA = 2 };
struct DLDevice {
  int32_t device_type;  // a DLDeviceType, or one that we do not know
  int32_t device_id;
};

enum DLDataTypeCode : uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLComplex = 5, kDLBool = 6 };
struct DLDataType {
  uint8_t code;  // a DLDataTypeCode, or one that we do not know
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null means row-major
  uint64_t byte_offset;
};

inline constexpr uint64_t kReadOnly = 1;  // bits of `flags`
inline constexpr uint64_t kIsCopied = 2;

struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned* self);  // may be null
  uint64_t flags;
  DLTensor dl_tensor;
};

static_assert(sizeof(DLDevice) == 8 && sizeof(DLDataType) == 4 && sizeof(DLTensor) == 48);
static_assert(offsetof(DLTensor, device) == 8 && offsetof(DLTensor, ndim) == 16 && offsetof(DLTensor, dtype) == 20);
static_assert(offsetof(DLTensor, shape) == 24 && offsetof(DLTensor, strides) == 32 &&
              offsetof(DLTensor, byte_offset) == 40);
static_assert(offsetof(DLManagedTensorVersioned, manager_ctx) == 8 &&
              offsetof(DLManagedTensorVersioned, deleter) == 16);
static_assert(offsetof(DLManagedTensorVersioned, flags) == 24 && offsetof(DLManagedTensorVersioned, dl_tensor) == 32);
static_assert(sizeof(DLManagedTensorVersioned) == 80);

}  // namespace dlpack

// The tensor's bytes for another library, which calls the deleter when it is done; until then the bytes stay. Read-only
// memory is marked so. Throws InvalidArgument for a tensor without bytes (sparse, undefined, on the null device).
dlpack::DLManagedTensorVersioned* to_dlpack(const Tensor& tensor);

// A tensor on another library's bytes. Takes over `managed` whatever happens: its deleter runs once, when the last
// tensor on the bytes goes or when they are refused. Throws InvalidArgument for what we cannot hold: another major
// version, a device other than the CPU, an unknown dtype, vector lanes, more than kMaxDims dimensions, impossible
// sizes, unaligned memory. What comes as read-only cannot be written in place.
Tensor from_dlpack(dlpack::DLManagedTensorVersioned* managed);

}  // namespace chorale
