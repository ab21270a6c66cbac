// Attributes of an op call: a trivially copyable struct whose fields are listed once. Equality, hashing, printing and
// setting by name are derived from the list.
//
//   struct SumAttrs { IntList dims; bool keepdim = false; };
//   CHORALE_FIELDS(SumAttrs, dims, keepdim)
#pragma once

#include <concepts>
#include <cstddef>
#include <cstring>
#include <iosfwd>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "chorale/base/dtype.h"
#include "chorale/base/error.h"
#include "chorale/base/for_each.h"
#include "chorale/base/scalar.h"
#include "chorale/tensor/shape.h"

namespace chorale {

// A list of at most kMost integers: dimensions, sizes, pads. Trivially copyable, unlike Shape.
template <size_t kMost>
struct IntListOf {
  int64_t values[kMost] = {};
  int64_t count = 0;

  IntListOf() = default;
  template <std::integral T>
  IntListOf(T value) : IntListOf({static_cast<int64_t>(value)}) {}  // NOLINT(google-explicit-constructor)
  IntListOf(std::initializer_list<int64_t> list) : IntListOf(std::span<const int64_t>(list.begin(), list.size())) {}
  IntListOf(std::span<const int64_t> list) {  // NOLINT(google-explicit-constructor)
    CHORALE_CHECK(list.size() <= kMost, "a list of dimensions has at most ", kMost, " entries, not ", list.size());
    for (int64_t value : list) values[count++] = value;
  }
  IntListOf(const Shape& shape) : IntListOf(std::span<const int64_t>(shape.data(), shape.size())) {}  // NOLINT
  IntListOf(const std::vector<int64_t>& list) : IntListOf(std::span<const int64_t>(list)) {}          // NOLINT

  size_t size() const { return static_cast<size_t>(count); }
  bool empty() const { return count == 0; }
  const int64_t* begin() const { return values; }
  const int64_t* end() const { return values + count; }
  int64_t operator[](size_t i) const { return values[i]; }
  std::span<const int64_t> span() const { return {values, size()}; }
  Shape shape() const { return Shape(span()); }
};
using IntList = IntListOf<kMaxDims>;
// One entry per dimension of an image: several of these fit into the attributes of a convolution.
using SpatialList = IntListOf<3>;

namespace kernel {

enum class FieldKind : uint8_t { kBool, kI64, kF64, kDType, kEnum, kInts, kSpatial, kScalar };
using FieldValue = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, Scalar>;

struct Field {
  const char* name;
  FieldKind kind;
  size_t offset;
};

struct AttrsType {
  const char* name;
  size_t size;
  std::span<const Field> fields;
  void (*construct)(void* memory);  // the defaults
};

template <class T>
constexpr FieldKind field_kind() {
  if constexpr (std::is_same_v<T, bool>) {
    return FieldKind::kBool;
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return FieldKind::kI64;
  } else if constexpr (std::is_same_v<T, double>) {
    return FieldKind::kF64;
  } else if constexpr (std::is_same_v<T, DType>) {
    return FieldKind::kDType;
  } else if constexpr (std::is_same_v<T, IntList>) {
    return FieldKind::kInts;
  } else if constexpr (std::is_same_v<T, SpatialList>) {
    return FieldKind::kSpatial;
  } else if constexpr (std::is_same_v<T, Scalar>) {
    return FieldKind::kScalar;
  } else {
    static_assert(
        std::is_enum_v<T> && sizeof(T) == 1,
        "an attribute field is bool, int64_t, double, DType, IntList, SpatialList, Scalar or a one-byte enum");
    return FieldKind::kEnum;
  }
}

}  // namespace kernel

// The widest is as_strided: two lists and an offset.
inline constexpr size_t kAttrsBytes = 2 * sizeof(IntList) + 8;

class Attrs {
 public:
  Attrs() = default;
  template <class T>
  requires requires { attrs_type(base::TypeTag<T>{}); }
  Attrs(const T& value) : type_(&attrs_type(base::TypeTag<T>{})) {  // NOLINT(google-explicit-constructor)
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kAttrsBytes);
    std::memcpy(bytes_, &value, sizeof(T));
  }
  explicit Attrs(const kernel::AttrsType& type) : type_(&type) { type.construct(bytes_); }
  Attrs(const Attrs& other) : type_(other.type_) {
    if (type_) std::memcpy(bytes_, other.bytes_, type_->size);
  }
  Attrs& operator=(const Attrs& other) {
    type_ = other.type_;
    if (type_) std::memmove(bytes_, other.bytes_, type_->size);
    return *this;
  }

  template <class T>
  const T& get() const {
    CHORALE_INVARIANT(type_ == &attrs_type(base::TypeTag<T>{}), "attributes are ", type_ ? type_->name : "absent");
    return *reinterpret_cast<const T*>(bytes_);
  }
  const kernel::AttrsType* type() const { return type_; }
  const void* bytes() const { return bytes_; }
  // Throws InvalidArgument for an unknown name (listing the known ones) or a value of the wrong kind.
  void set(std::string_view field, const kernel::FieldValue& value);
  kernel::FieldValue at(const kernel::Field& field) const;

  friend bool operator==(const Attrs& a, const Attrs& b);
  size_t hash() const;
  friend std::ostream& operator<<(std::ostream& out, const Attrs& attrs);  // {dims=[1], keepdim=true}

 private:
  const kernel::AttrsType* type_ = nullptr;
  alignas(8) std::byte bytes_[kAttrsBytes];
};

}  // namespace chorale

#define CHORALE_FIELD(field) \
  ::chorale::kernel::Field{#field, ::chorale::kernel::field_kind<decltype(Listed::field)>(), offsetof(Listed, field)},
#define CHORALE_FIELDS(T, ...)                                                                            \
  inline const ::chorale::kernel::AttrsType& attrs_type(::chorale::base::TypeTag<T>) {                    \
    using Listed = T;                                                                                     \
    static constexpr ::chorale::kernel::Field kFields[] = {CHORALE_FOR_EACH(CHORALE_FIELD, __VA_ARGS__)}; \
    static constexpr ::chorale::kernel::AttrsType kType{#T, sizeof(T), kFields,                           \
                                                        [](void* memory) { new (memory) T(); }};          \
    return kType;                                                                                         \
  }
