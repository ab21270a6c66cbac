// A tensor: a typed, strided view of a storage. Tensor is a cheap handle; copying it copies no bytes, and two handles
// on one tensor, or two tensors on one storage, see each other's writes.
//
// Threads: distinct handles may be used from distinct threads; reading one tensor from several threads is safe; a write
// (an in-place op, an optimizer step, set_grad) needs the caller to order it against every other use of that storage.
#pragma once

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "chorale/base/dtype.h"
#include "chorale/base/scalar.h"
#include "chorale/tensor/shape.h"
#include "chorale/tensor/storage.h"

namespace chorale {

class Tensor;

// What a layer knows of a tensor besides its bytes: the parts of a sparse one, which shard of what it is, which value
// of a trace. A tensor has at most one. The maker of a view of such a tensor gives the view its own; an alias, the
// same tensor under another handle, gets a copy.
struct TensorExtension {
  enum class Kind : uint8_t { kSparse, kSharded, kTraced };
  explicit TensorExtension(Kind which) : kind(which) {}
  virtual ~TensorExtension() = default;
  virtual std::unique_ptr<TensorExtension> copy() const = 0;
  // Why there are no bytes, and what to do: said when something asks for them.
  virtual std::string why_no_bytes(const Tensor& tensor) const = 0;
  // Whether the bytes came to be because somebody asked for them ("item()", "a pointer to its bytes"): then the tensor
  // has them, and no extension any more.
  virtual bool provide_bytes(const Tensor&, const char* /*asked*/) { return false; }
  const Kind kind;
};
struct SparseParts;

// How to make a tensor: what an op's inference says of a result.
struct TensorSpec {
  Shape sizes;
  DType dtype = DType::kF32;
  Device device;
};

class Tensor {
 public:
  // The slot in which autograd keeps what it knows of a tensor; opaque to this layer.
  struct AutogradSlot {
    virtual ~AutogradSlot() = default;
  };
  // What the handles on one tensor share.
  struct Impl : base::RefCounted {
    base::Intrusive<Storage> storage;
    void* data = nullptr;  // of element 0; null on the null device and where there are no elements
    int64_t elems = 0;
    int64_t offset = 0;  // of element 0 in the storage
    Shape sizes;
    Strides strides;
    DType dtype = DType::kF32;
    Device device;
    bool contiguous = true;
    bool inference = false;  // made where autograd was told that it will never be asked (autograd/mode.h)
    std::unique_ptr<AutogradSlot> autograd;
    std::unique_ptr<TensorExtension> extension;

    static void destroy(Impl* impl);
  };

  Tensor() = default;  // undefined: no tensor at all (an absent bias, a gradient that is zero)
  Tensor(const Tensor&) = default;
  Tensor(Tensor&&) = default;
  // A handle that is about to vanish cannot be assigned to: x[0] = y would change nothing. copy_(x[0], y) writes.
  Tensor& operator=(const Tensor&) & = default;
  Tensor& operator=(Tensor&&) & = default;
  ~Tensor() = default;

  // Uninitialised memory, contiguous.
  static Tensor empty(const Shape& sizes, DType dtype, Device device = kCpu);
  static Tensor empty(TensorSpec&& spec);
  static Tensor empty_strided(const Shape& sizes, const Strides& strides, DType dtype, Device device = kCpu);
  // A zero-dim tensor.
  static Tensor scalar(Scalar value, DType dtype, Device device = kCpu);
  // Copies of the host's values.
  template <class T>
  static Tensor from(std::span<const T> values, const Shape& sizes, Device device = kCpu);
  template <class T>
  static Tensor from(const std::vector<T>& values, const Shape& sizes, Device device = kCpu);
  template <class T>
  static Tensor from(std::initializer_list<T> values, const Shape& sizes, Device device = kCpu) {
    return from(std::span<const T>(values.begin(), values.size()), sizes, device);
  }
  // Borrows: the memory must outlive every tensor on it, unless `release` says how to let go of it (it runs once, when
  // the last tensor goes, but not when this call throws). Constant memory gives a tensor that cannot be written.
  template <class T>
  static Tensor borrow(std::span<T> values, const Shape& sizes, std::function<void()> release = {});
  template <class T>
  static Tensor borrow(std::span<const T> values, const Shape& sizes, std::function<void()> release = {});
  // A view of any storage; bounds are checked.
  static Tensor on(base::Intrusive<Storage> storage, const Shape& sizes, const Strides& strides, int64_t offset,
                   DType dtype);
  // Shape, strides, dtype and device as of any tensor, and an extension that stands for its bytes: a request for
  // those fails and says why there are none.
  static Tensor without_bytes(const Shape& sizes, const Strides& strides, DType dtype, Device device,
                              std::unique_ptr<TensorExtension> extension);
  // A sparse tensor of shape `sizes`. Shapes are checked here, index values by the ops that follow them.
  static Tensor sparse_coo(const Tensor& indices, const Tensor& values, const Shape& sizes, bool coalesced = false);

  bool defined() const { return static_cast<bool>(impl_); }
  explicit operator bool() const { return defined(); }
  // These and all below throw InvalidArgument for an undefined tensor.
  DType dtype() const { return of("dtype").dtype; }
  Device device() const { return of("device").device; }
  const Shape& sizes() const { return of("sizes").sizes; }
  const Strides& strides() const { return of("strides").strides; }
  int64_t size(int64_t dim) const;
  int64_t stride(int64_t dim) const;
  int64_t dims() const { return static_cast<int64_t>(of("dims").sizes.size()); }  // the number of dimensions
  [[deprecated("call dims(): a rank is a process")]] int64_t rank() const { return dims(); }
  int64_t elems() const { return of("elems").elems; }
  int64_t offset() const { return of("offset").offset; }
  size_t elem_bytes() const { return size_of(of("elem_bytes").dtype); }
  bool is_contiguous() const { return of("is_contiguous").contiguous; }
  bool is_channels_last() const { return chorale::is_channels_last(sizes(), strides()); }
  // Null for an ordinary tensor.
  const TensorExtension* extension() const { return of("extension").extension.get(); }
  bool is_sparse() const { return has(TensorExtension::Kind::kSparse); }
  bool is_sharded() const { return has(TensorExtension::Kind::kSharded); }
  bool is_traced() const { return has(TensorExtension::Kind::kTraced); }
  const SparseParts& sparse() const;
  const base::Intrusive<Storage>& storage() const { return of("storage").storage; }

  // Untyped, and typed with a check. On the null device there is no data: null, and StateError. A tensor whose
  // extension stands for its bytes has neither: StateError.
  void* raw() const {
    const Impl& impl = of("raw");
    if (!impl.data && impl.extension) [[unlikely]]
      need_bytes("a pointer to its bytes");
    return impl.data;
  }
  template <class T>
  T* data() const {
    check_access(dtype_of<std::remove_const_t<T>>);
    return static_cast<T*>(impl_->data);
  }
  // The elements of a contiguous tensor.
  template <class T>
  std::span<T> span() const {
    T* first = data<T>();
    check_contiguous();
    return {first, static_cast<size_t>(elems())};
  }
  // A copy of the elements in row-major order, converted to T, whatever dtype and strides.
  template <class T>
  std::vector<T> to_vector() const;
  // The one element, converted to T; InvalidArgument when there is not exactly one.
  template <class T>
  T item() const;

  // A view of what stands at place i of the first dimension: select(x, 0, i), which defines it (op/view.h).
  Tensor operator[](int64_t i) const;

  // The same bytes seen otherwise, without any record of it (ops do that); bounds are the caller's affair.
  Tensor view_as(Shape sizes, Strides strides, int64_t offset) const;
  // The same bytes and shape under a new handle that autograd knows nothing of.
  Tensor alias() const;
  // Makes this handle's tensor look at another's bytes, shape and dtype; for parameters that move.
  void set_data(const Tensor& other) const;

  Impl* impl() const { return impl_.get(); }
  int64_t use_count() const { return of("use_count").use_count(); }
  bool is(const Tensor& other) const { return impl_ == other.impl_; }
  // What raw() does for a tensor whose extension stands for its bytes: they come, or StateError says why not. `asked`
  // says what for.
  void need_bytes(const char* asked) const;
  // True when the stretches of memory they reach over meet, even if they only interleave there.
  bool overlaps(const Tensor& other) const;

  static Tensor adopt(Impl* impl) { return Tensor(base::Intrusive<Impl>::adopt(impl)); }
  static Tensor share(Impl* impl) { return Tensor(base::Intrusive<Impl>::share(impl)); }

 private:
  explicit Tensor(base::Intrusive<Impl> impl) : impl_(std::move(impl)) {}
  static Tensor wrap_values(void* values, size_t count, const Shape& sizes, DType dtype, std::function<void()> release,
                            Access access);
  const Impl& of(const char* asked) const {
    if (!impl_) [[unlikely]]
      raise_undefined(asked);
    return *impl_;
  }
  bool has(TensorExtension::Kind kind) const {
    const TensorExtension* known = extension();
    return known && known->kind == kind;
  }
  [[noreturn]] static void raise_undefined(const char* asked);
  void check_has_bytes(const char* asked) const;
  void check_readable(const char* asked) const;
  void check_access(DType wanted) const;
  void check_contiguous() const;

  base::Intrusive<Impl> impl_;
};

// The parts of a sparse (COO) tensor: indices [sparse_dim, nnz] in i64, values [nnz, dense dims…]. Entries with equal
// indices add up; `coalesced` says that there are none and that they are sorted.
struct SparseParts final : TensorExtension {
  SparseParts(Tensor its_indices, Tensor its_values, bool is_coalesced)
      : TensorExtension(Kind::kSparse),
        indices(std::move(its_indices)),
        values(std::move(its_values)),
        coalesced(is_coalesced) {}
  std::unique_ptr<TensorExtension> copy() const override;
  std::string why_no_bytes(const Tensor& tensor) const override;

  Tensor indices;
  Tensor values;
  bool coalesced = false;
};

using Tensors = SmallVector<Tensor, 3>;

// Options of printing; the defaults suit a terminal.
struct PrintOptions {
  int precision = 4;
  int64_t threshold = 1000;  // above this many elements, the middle of long dimensions is left out
  int64_t edge = 3;          // elements shown at either end then
  int line_width = 100;
};
std::string to_string(const Tensor& tensor, const PrintOptions& options = {});
std::ostream& operator<<(std::ostream& out, const Tensor& tensor);

}  // namespace chorale
