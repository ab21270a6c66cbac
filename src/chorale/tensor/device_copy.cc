#include "chorale/tensor/device_copy.h"

#include "chorale/base/error.h"
#include "chorale/device/runtime.h"
#include "chorale/device/stream.h"
#include "chorale/tensor/strided.h"
#include "chorale/vec/strided_copy.h"

namespace chorale {

void copy_between_devices(const Tensor& from, const Tensor& to) {
  CHORALE_INVARIANT(from.sizes() == to.sizes() && from.dtype() == to.dtype(), "copy of ", from.sizes(), " ",
                    from.dtype(), " into ", to.sizes(), " ", to.dtype());
  CHORALE_CHECK_STATE(from.device().type != DeviceType::kNull, "[to] a tensor on device null has no values to copy");
  CHORALE_CHECK_STATE(to.device().type != DeviceType::kNull, "[to] device null takes no values");
  if (from.elems() == 0) return;
  const Device source = from.device(), target = to.device();
  if (source == kCpu && target == kCpu) return vec::copy_strided(strided(from), strided(to));
  const Device device = target == kCpu ? source : target;
  const Stream stream = current_stream(device);
  if (source != kCpu && source != device) {
    Event(current_stream(source)).wait(stream);
    record_stream(from, stream);
  }
  runtime_of(device).copy(strided(from), source, strided(to), target, stream);
}

Tensor on_host(const Tensor& x) {
  if (x.device() == kCpu) return x;
  const Tensor copy = Tensor::empty(x.sizes(), x.dtype());
  copy_between_devices(x, copy);
  return copy;
}

Tensor empty_pinned(const Shape& sizes, DType dtype, Device for_device) {
  Allocator* const allocator = for_device == kCpu ? nullptr : runtime_of(for_device).pinned();
  if (!allocator) return Tensor::empty(sizes, dtype);
  const size_t bytes = static_cast<size_t>(count_elems(sizes)) * size_of(dtype);
  const memory::Block block = allocator->allocate(bytes);
  return Tensor::on(Storage::wrap(block.data, bytes, kCpu, [allocator, block] { allocator->deallocate(block); }), sizes,
                    contiguous_strides(sizes), 0, dtype);
}

void record_stream(const Tensor& x, Stream stream) {
  if (x.elems() > 0) record_stream(x.device(), x.storage()->data(), stream);
}

}  // namespace chorale
