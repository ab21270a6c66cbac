#include "chorale/tensor/tensor.h"

#include <algorithm>
#include <cstring>

#include "chorale/base/error.h"
#include "chorale/base/pool.h"
#include "chorale/tensor/device_copy.h"
#include "chorale/tensor/strided.h"
#include "chorale/vec/strided_copy.h"

namespace chorale {
namespace {

Tensor::Impl* new_impl() { return base::Pool<Tensor::Impl>::make(); }

void check_dims(const Shape& sizes) {
  CHORALE_CHECK(sizes.size() <= kMaxDims, "a tensor has at most ", kMaxDims, " dimensions, not ", sizes.size(), ": ",
                sizes);
}

template <class To, class From>
To convert_element(const From& value) {
  if constexpr (std::is_same_v<From, To>) {
    return value;
  } else if constexpr (std::is_same_v<From, float16> || std::is_same_v<From, bfloat16>) {
    return Scalar(static_cast<float>(value)).to<To>();
  } else {
    return Scalar(value).template to<To>();
  }
}

// Made on the host, wanted on `device`. The device null has a shape only.
Tensor placed(Tensor made, Device device) {
  if (device == kCpu) [[likely]]
    return made;
  Tensor result = Tensor::empty(made.sizes(), made.dtype(), device);
  if (device.type != DeviceType::kNull) copy_between_devices(made, result);
  return result;
}

}  // namespace

void Tensor::Impl::destroy(Impl* impl) { base::Pool<Tensor::Impl>::recycle(impl); }

Tensor Tensor::empty(const Shape& sizes, DType dtype, Device device) { return empty(TensorSpec{sizes, dtype, device}); }

Tensor Tensor::empty(TensorSpec&& spec) {
  check_dims(spec.sizes);
  const int64_t elems = count_elems(spec.sizes);
  Tensor::Impl* impl = new_impl();
  Tensor result = adopt(impl);
  impl->elems = elems;
  impl->strides = contiguous_strides(spec.sizes);
  impl->sizes = std::move(spec.sizes);
  impl->dtype = spec.dtype;
  impl->device = spec.device;
  impl->storage = Storage::allocate(static_cast<size_t>(elems) * size_of(spec.dtype), spec.device);
  impl->data = impl->storage->data();
  return result;
}

Tensor Tensor::empty_strided(const Shape& sizes, const Strides& strides, DType dtype, Device device) {
  check_dims(sizes);
  CHORALE_CHECK(sizes.size() == strides.size(), "[empty_strided] ", sizes.size(), " sizes but ", strides.size(),
                " strides");
  count_elems(sizes);
  CHORALE_CHECK(std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride >= 0; }),
                "[empty_strided] strides cannot be negative: ", strides);
  const std::optional<memory::Reach> reach = reach_of(sizes, strides);
  CHORALE_CHECK(reach, "[empty_strided] sizes ", sizes, " with strides ", strides,
                " reach further than can be counted");
  const size_t bytes = static_cast<size_t>(reach->high) * size_of(dtype);
  return on(Storage::allocate(bytes, device), sizes, strides, 0, dtype);
}

Tensor Tensor::without_bytes(const Shape& sizes, const Strides& strides, DType dtype, Device device,
                             std::unique_ptr<TensorExtension> extension) {
  check_dims(sizes);
  CHORALE_CHECK(sizes.size() == strides.size(), "[without_bytes] ", sizes.size(), " sizes but ", strides.size(),
                " strides");
  Tensor::Impl* impl = new_impl();
  Tensor result = adopt(impl);
  impl->elems = count_elems(sizes);
  impl->sizes = sizes;
  impl->strides = strides;
  impl->dtype = dtype;
  impl->device = device;
  impl->contiguous = chorale::is_contiguous(sizes, strides);
  const std::optional<memory::Reach> reach = reach_of(sizes, strides);
  impl->storage = Storage::without_bytes(device, reach ? static_cast<size_t>(reach->high) * size_of(dtype) : 0);
  impl->extension = std::move(extension);
  return result;
}

Tensor Tensor::on(base::Intrusive<Storage> storage, const Shape& sizes, const Strides& strides, int64_t offset,
                  DType dtype) {
  CHORALE_CHECK(storage, "[view] there is no storage");
  check_dims(sizes);
  CHORALE_CHECK(sizes.size() == strides.size(), "[view] ", sizes.size(), " sizes but ", strides.size(), " strides");
  const int64_t elems = count_elems(sizes);
  const auto capacity = static_cast<int64_t>(storage->bytes() / size_of(dtype));
  const std::optional<memory::Reach> reach = reach_of(sizes, strides);
  int64_t first = 0, end = 0;
  const bool counted = reach && !__builtin_add_overflow(offset, reach->low, &first) &&
                       !__builtin_add_overflow(offset, reach->high, &end);
  CHORALE_CHECK(counted, "[view] sizes ", sizes, " with strides ", strides, " and offset ", offset,
                " reach further than can be counted");
  CHORALE_CHECK(elems == 0 || (first >= 0 && end <= capacity), "[view] sizes ", sizes, " with strides ", strides,
                " and offset ", offset, " reach elements ", first, " to ", end - 1, " of a storage of ", capacity);
  CHORALE_CHECK(reinterpret_cast<uintptr_t>(storage->data()) % std::min<size_t>(size_of(dtype), 8) == 0,
                "[view] memory at ", static_cast<const void*>(storage->data()), " is not aligned for elements of ",
                dtype, "; copy it first");
  Tensor::Impl* impl = new_impl();
  Tensor result = adopt(impl);
  impl->elems = elems;
  impl->offset = offset;
  impl->sizes = sizes;
  impl->strides = strides;
  impl->dtype = dtype;
  impl->device = storage->device();
  impl->contiguous = chorale::is_contiguous(sizes, strides);
  if (storage->data() && elems > 0) impl->data = storage->data() + offset * static_cast<int64_t>(size_of(dtype));
  impl->storage = std::move(storage);
  return result;
}

Tensor Tensor::view_as(Shape sizes, Strides strides, int64_t offset) const {
  Tensor::Impl* impl = new_impl();
  Tensor result = adopt(impl);
  impl->elems = count_elems(sizes);
  impl->offset = offset;
  impl->contiguous = chorale::is_contiguous(sizes, strides);
  impl->sizes = std::move(sizes);
  impl->strides = std::move(strides);
  impl->dtype = impl_->dtype;
  impl->device = impl_->device;
  impl->storage = impl_->storage;
  const auto bytes = static_cast<int64_t>(size_of(impl_->dtype));
  if (impl_->data && impl->elems > 0) {
    // It is counted from the tensor's own pointer: an operand of a compiled graph has one without a storage that holds
    // it.
    impl->data = static_cast<std::byte*>(impl_->data) + (offset - impl_->offset) * bytes;
  } else if (impl_->storage->data() && impl->elems > 0) {
    impl->data = impl_->storage->data() + offset * bytes;
  }
  return result;
}

Tensor Tensor::alias() const {
  const Tensor::Impl& from = of("alias");
  Tensor::Impl* impl = new_impl();
  Tensor result = adopt(impl);
  if (from.extension) [[unlikely]]
    impl->extension = from.extension->copy();
  impl->storage = impl_->storage;
  impl->data = impl_->data;
  impl->elems = impl_->elems;
  impl->offset = impl_->offset;
  impl->sizes = impl_->sizes;
  impl->strides = impl_->strides;
  impl->dtype = impl_->dtype;
  impl->device = impl_->device;
  impl->contiguous = impl_->contiguous;
  return result;
}

void Tensor::set_data(const Tensor& other) const {
  CHORALE_CHECK(defined() && other.defined() && !other.is_sparse() && !is_sparse(),
                "[set_data] needs two dense tensors");
  impl_->storage = other.impl_->storage;
  impl_->data = other.impl_->data;
  impl_->elems = other.impl_->elems;
  impl_->offset = other.impl_->offset;
  impl_->sizes = other.impl_->sizes;
  impl_->strides = other.impl_->strides;
  impl_->dtype = other.impl_->dtype;
  impl_->device = other.impl_->device;
  impl_->contiguous = other.impl_->contiguous;
  impl_->extension = other.impl_->extension ? other.impl_->extension->copy() : nullptr;
}

Tensor Tensor::scalar(Scalar value, DType dtype, Device device) {
  Tensor result = empty(Shape{}, dtype);
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    *result.data<T>() = value.to<T>();
  });
  return placed(std::move(result), device);
}

Tensor Tensor::sparse_coo(const Tensor& indices, const Tensor& values, const Shape& sizes, bool coalesced) {
  CHORALE_CHECK(indices.defined() && values.defined(), "[sparse_coo] needs indices and values");
  CHORALE_CHECK(!indices.is_sparse() && !values.is_sparse(), "[sparse_coo] indices and values must be dense");
  CHORALE_CHECK(indices.device() == values.device(), "[sparse_coo] indices are on ", indices.device(),
                " but values on ", values.device());
  check_dims(sizes);
  CHORALE_CHECK(indices.dtype() == DType::kI64 && indices.dims() == 2,
                "[sparse_coo] indices must be i64 of shape [sparse_dim, nnz], not ", indices.dtype(), " ",
                indices.sizes());
  const int64_t sparse_dim = indices.size(0), nnz = indices.size(1);
  CHORALE_CHECK(values.dims() >= 1 && values.size(0) == nnz, "[sparse_coo] ", nnz, " indices but values of shape ",
                values.sizes());
  CHORALE_CHECK(sparse_dim + values.dims() - 1 == static_cast<int64_t>(sizes.size()), "[sparse_coo] shape ", sizes,
                " needs ", sizes.size(), " dimensions, got ", sparse_dim, " sparse and ", values.dims() - 1,
                " dense ones");
  for (int64_t d = 1; d < values.dims(); ++d) {
    CHORALE_CHECK(values.size(d) == sizes[static_cast<size_t>(sparse_dim + d - 1)], "[sparse_coo] values of shape ",
                  values.sizes(), " do not fit shape ", sizes);
  }
  check_dims(sizes);
  Tensor::Impl* impl = new_impl();
  Tensor result = adopt(impl);
  impl->elems = count_elems(sizes);
  impl->sizes = sizes;
  impl->strides = contiguous_strides(sizes);
  impl->dtype = values.dtype();
  impl->device = values.device();
  impl->storage = values.storage();  // so that versions and devices have one answer; `data` stays null
  impl->extension = std::make_unique<SparseParts>(indices, values, coalesced);
  return result;
}

const SparseParts& Tensor::sparse() const {
  CHORALE_CHECK(is_sparse(), "[sparse] a dense tensor of shape ", sizes(), " has no sparse parts");
  return static_cast<const SparseParts&>(*impl_->extension);
}

std::unique_ptr<TensorExtension> SparseParts::copy() const {
  return std::make_unique<SparseParts>(indices, values, coalesced);
}
std::string SparseParts::why_no_bytes(const Tensor& tensor) const {
  return concat("a sparse tensor of shape ", tensor.sizes(), " has no dense elements; see sparse().values");
}

void Tensor::raise_undefined(const char* asked) {
  throw InvalidArgument(
      concat("[", asked,
             "] this tensor is undefined: default-constructed, moved from, or a result that is absent "
             "(a gradient before the first backward, for example)"));
}
void Tensor::need_bytes(const char* asked) const {
  TensorExtension* known = impl_->extension.get();
  if (impl_->data || !known || known->provide_bytes(*this, asked)) return;
  throw StateError(concat("[data] ", impl_->extension->why_no_bytes(*this)));
}

int64_t Tensor::size(int64_t dim) const {
  if (!impl_) [[unlikely]]
    raise_undefined("size");
  CHORALE_CHECK(dims() > 0, "[size] a scalar has no dimensions");
  return impl_->sizes[static_cast<size_t>(normalize_dim("size", dim, dims()))];
}
int64_t Tensor::stride(int64_t dim) const {
  if (!impl_) [[unlikely]]
    raise_undefined("stride");
  CHORALE_CHECK(dims() > 0, "[stride] a scalar has no dimensions");
  return impl_->strides[static_cast<size_t>(normalize_dim("stride", dim, dims()))];
}

void Tensor::check_access(DType wanted) const {
  // Kernels ask for each operand, and small ones do little else.
  if (impl_ && !impl_->extension && impl_->device.type == DeviceType::kCpu && impl_->dtype == wanted) [[likely]]
    return;
  check_readable("a pointer to its bytes");
  CHORALE_CHECK(wanted == dtype(), "[data] asked for ", wanted, " elements of a tensor of ", dtype());
}
void Tensor::check_has_bytes(const char* asked) const {
  if (!impl_) raise_undefined("data");
  if (extension()) need_bytes(asked);
  CHORALE_CHECK_STATE(device().type != DeviceType::kNull, "[data] a tensor on device ", device(),
                      " has no elements that the host can read");
}
void Tensor::check_readable(const char* asked) const {
  check_has_bytes(asked);
  CHORALE_CHECK_STATE(device().type == DeviceType::kCpu, "[data] a tensor on device ", device(),
                      " has no elements that the host can read; copy it with to(x, kCpu) first");
}
void Tensor::check_contiguous() const {
  CHORALE_CHECK(is_contiguous(), "[span] needs a contiguous tensor; sizes ", sizes(), " have strides ", strides(),
                ": call contiguous() first");
}

template <class T>
std::vector<T> Tensor::to_vector() const {
  (void)of("to_vector");
  check_has_bytes("to_vector()");
  Tensor rows = on_host(*this);
  if (!rows.is_contiguous()) {
    rows = empty(sizes(), dtype());
    vec::copy_strided(strided(*this), strided(rows));
  }
  std::vector<T> result(static_cast<size_t>(elems()));
  visit_dtype(dtype(), [&](auto tag) {
    using From = typename decltype(tag)::type;
    const auto* from = static_cast<const From*>(rows.raw());
    for (size_t i = 0; i < result.size(); ++i) result[i] = convert_element<T>(from[i]);
  });
  return result;
}

template <class T>
T Tensor::item() const {
  (void)of("item");
  check_has_bytes("item()");
  CHORALE_CHECK(elems() == 1, "[item] needs one element, found shape ", sizes(), " with ", elems());
  const Tensor host = on_host(*this);
  return visit_dtype(dtype(), [&](auto tag) {
    using From = typename decltype(tag)::type;
    return convert_element<T>(*static_cast<const From*>(host.raw()));
  });
}

template <class T>
Tensor Tensor::from(std::span<const T> values, const Shape& sizes, Device device) {
  CHORALE_CHECK(count_elems(sizes) == static_cast<int64_t>(values.size()), "[from] ", values.size(),
                " values for shape ", sizes);
  Tensor result = empty(sizes, dtype_of<T>);
  std::copy(values.begin(), values.end(), static_cast<T*>(result.raw()));
  return placed(std::move(result), device);
}

template <class T>
Tensor Tensor::from(const std::vector<T>& values, const Shape& sizes, Device device) {
  if constexpr (std::is_same_v<T, bool>) {  // a packed vector has no span
    CHORALE_CHECK(count_elems(sizes) == static_cast<int64_t>(values.size()), "[from] ", values.size(),
                  " values for shape ", sizes);
    Tensor result = empty(sizes, DType::kBool);
    std::copy(values.begin(), values.end(), static_cast<bool*>(result.raw()));
    return placed(std::move(result), device);
  } else {
    return from(std::span<const T>(values), sizes, device);
  }
}

// NOLINTBEGIN(performance-unnecessary-value-param): it is moved, which the check does not see in a template
template <class T>
Tensor Tensor::borrow(std::span<T> values, const Shape& sizes, std::function<void()> release) {
  return wrap_values(values.data(), values.size(), sizes, dtype_of<T>, std::move(release), Access::kReadWrite);
}

template <class T>
Tensor Tensor::borrow(std::span<const T> values, const Shape& sizes, std::function<void()> release) {
  return wrap_values(const_cast<T*>(values.data()), values.size(), sizes, dtype_of<T>, std::move(release),
                     Access::kReadOnly);
}
// NOLINTEND(performance-unnecessary-value-param)

Tensor Tensor::wrap_values(void* values, size_t count, const Shape& sizes, DType dtype, std::function<void()> release,
                           Access access) {
  // Everything that can be wrong is found before the memory is ours to release.
  check_dims(sizes);
  CHORALE_CHECK(count_elems(sizes) == static_cast<int64_t>(count), "[borrow] ", count, " values for shape ", sizes);
  return on(Storage::wrap(values, count * size_of(dtype), kCpu, std::move(release), access), sizes,
            contiguous_strides(sizes), 0, dtype);
}

#define CHORALE_INSTANTIATE(T, name)                                                    \
  template std::vector<T> Tensor::to_vector<T>() const;                                 \
  template T Tensor::item<T>() const;                                                   \
  template Tensor Tensor::from<T>(std::span<const T>, const Shape&, Device);            \
  template Tensor Tensor::from<T>(const std::vector<T>&, const Shape&, Device);         \
  template Tensor Tensor::borrow<T>(std::span<T>, const Shape&, std::function<void()>); \
  template Tensor Tensor::borrow<T>(std::span<const T>, const Shape&, std::function<void()>);
CHORALE_FOR_EACH_DTYPE(CHORALE_INSTANTIATE)
#undef CHORALE_INSTANTIATE

bool Tensor::overlaps(const Tensor& other) const {
  if (elems() == 0 || other.elems() == 0) return false;
  if (!impl_->data || !other.impl_->data) return impl_->storage == other.impl_->storage;  // no addresses to compare
  // Addresses are compared, not storages: two storages may wrap the same memory.
  const auto range = [](const Tensor& x) {
    const memory::Reach reach = reach_of(x.sizes(), x.strides()).value_or(memory::Reach{});
    const auto* base = static_cast<const std::byte*>(x.raw());
    const auto bytes = static_cast<int64_t>(x.elem_bytes());
    return std::pair(base + reach.low * bytes, base + reach.high * bytes);
  };
  const auto [low, high] = range(*this);
  const auto [other_low, other_high] = range(other);
  return low < other_high && other_low < high;
}

}  // namespace chorale
