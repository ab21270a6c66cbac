#include "chorale/kernel/attrs.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <ostream>

namespace chorale {
namespace {

template <class T>
const T& read(const Attrs& attrs, const kernel::Field& field) {
  return *reinterpret_cast<const T*>(static_cast<const std::byte*>(attrs.bytes()) + field.offset);
}

// Calls f with the field's value in its own type; an enum is its number.
template <class F>
auto visit_field(const Attrs& attrs, const kernel::Field& field, F&& f) {
  switch (field.kind) {
    case kernel::FieldKind::kBool:
      return f(read<bool>(attrs, field));
    case kernel::FieldKind::kI64:
      return f(read<int64_t>(attrs, field));
    case kernel::FieldKind::kF64:
      return f(read<double>(attrs, field));
    case kernel::FieldKind::kDType:
      return f(read<DType>(attrs, field));
    case kernel::FieldKind::kEnum:
      return f(read<uint8_t>(attrs, field));
    case kernel::FieldKind::kInts:
      return f(read<IntList>(attrs, field));
    case kernel::FieldKind::kSpatial:
      return f(read<SpatialList>(attrs, field));
    case kernel::FieldKind::kScalar:
      return f(read<Scalar>(attrs, field));
  }
  __builtin_unreachable();
}

struct Value {
  kernel::FieldValue operator()(bool value) const { return value; }
  kernel::FieldValue operator()(int64_t value) const { return value; }
  kernel::FieldValue operator()(double value) const { return value; }
  kernel::FieldValue operator()(DType value) const { return std::string(name_of(value)); }
  kernel::FieldValue operator()(uint8_t value) const { return static_cast<int64_t>(value); }
  template <size_t N>
  kernel::FieldValue operator()(const IntListOf<N>& value) const {
    return std::vector<int64_t>(value.begin(), value.end());
  }
  kernel::FieldValue operator()(const Scalar& value) const { return value; }
};

// Equal means: an op called with either gives the same bits. NaN is equal to itself, 0.0 and -0.0 are not equal.
struct Same {
  bool operator()(double a, double b) const { return Scalar::same_bits(a, b); }
  template <size_t N>
  bool operator()(const IntListOf<N>& a, const IntListOf<N>& b) const {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }
  template <class T>
  bool operator()(const T& a, const T& b) const {
    return a == b;
  }
};

struct Hash {
  static void combine(size_t& seed, size_t value) { seed ^= value + 0x9e3779b97f4a7c15u + (seed << 6) + (seed >> 2); }

  size_t operator()(double value) const { return std::hash<uint64_t>()(std::bit_cast<uint64_t>(value)); }
  template <size_t N>
  size_t operator()(const IntListOf<N>& value) const {
    size_t seed = value.size();
    for (int64_t v : value) combine(seed, std::hash<int64_t>()(v));
    return seed;
  }
  size_t operator()(const Scalar& value) const {
    size_t seed = static_cast<size_t>(value.kind());
    combine(seed, std::hash<int64_t>()(value.integer()));
    combine(seed, (*this)(value.real()));
    combine(seed, (*this)(value.imag()));
    return seed;
  }
  template <class T>
  size_t operator()(const T& value) const {
    return std::hash<T>()(value);
  }
};

struct Print {
  std::ostream& out;
  void operator()(bool value) const { out << (value ? "true" : "false"); }
  void operator()(double value) const { out << to_text(value); }
  void operator()(uint8_t value) const { out << static_cast<int>(value); }
  template <size_t N>
  void operator()(const IntListOf<N>& value) const {
    out << value.shape();
  }
  template <class T>
  void operator()(const T& value) const {
    out << value;
  }
};

const char* wanted_by(kernel::FieldKind kind) {
  constexpr const char* kNames[] = {"a bool",
                                    "an integer",
                                    "a number",
                                    "the name of a dtype",
                                    "the number of an enumerator",
                                    "a list of integers",
                                    "a list of at most three integers",
                                    "a number"};
  return kNames[static_cast<size_t>(kind)];
}
const char* given_in(const kernel::FieldValue& value) {
  constexpr const char* kNames[] = {"a bool", "an integer",         "a floating number",
                                    "text",   "a list of integers", "a number"};
  return kNames[value.index()];
}

std::string known_fields(const kernel::AttrsType& type) {
  std::string names;
  for (const kernel::Field& field : type.fields) names += (names.empty() ? "" : ", ") + std::string(field.name);
  return names;
}

}  // namespace

kernel::FieldValue Attrs::at(const kernel::Field& field) const { return visit_field(*this, field, Value{}); }

void Attrs::set(std::string_view name, const kernel::FieldValue& value) {
  CHORALE_CHECK(type_, "[attributes] there are none, so there is no '", name, "'");
  const auto field =
      std::find_if(type_->fields.begin(), type_->fields.end(), [&](const kernel::Field& f) { return name == f.name; });
  CHORALE_CHECK(field != type_->fields.end(), "[", type_->name, "] has no field '", name,
                "'; known: ", known_fields(*type_));
  std::byte* at = bytes_ + field->offset;
  const auto expect = [&](bool fits) {
    CHORALE_CHECK(fits, "[", type_->name, "] '", name, "' takes ", wanted_by(field->kind), ", not ", given_in(value));
  };
  const auto store = [&](const auto& v) { std::memcpy(at, &v, sizeof(v)); };
  const auto* integer = std::get_if<int64_t>(&value);
  const auto* real = std::get_if<double>(&value);
  switch (field->kind) {
    case kernel::FieldKind::kBool:
      expect(std::holds_alternative<bool>(value));
      return store(std::get<bool>(value));
    case kernel::FieldKind::kI64:
      expect(integer);
      return store(*integer);
    case kernel::FieldKind::kF64:
      expect(integer || real);
      return store(real ? *real : static_cast<double>(*integer));
    case kernel::FieldKind::kDType:
      expect(std::holds_alternative<std::string>(value));
      return store(dtype_from_name(std::get<std::string>(value)));
    case kernel::FieldKind::kEnum:
      expect(integer);
      CHORALE_CHECK(*integer >= 0 && *integer <= 255, "[", type_->name, "] '", name, "' has no enumerator ", *integer);
      return store(static_cast<uint8_t>(*integer));
    case kernel::FieldKind::kInts:
      expect(std::holds_alternative<std::vector<int64_t>>(value));
      return store(IntList(std::get<std::vector<int64_t>>(value)));
    case kernel::FieldKind::kSpatial:
      expect(std::holds_alternative<std::vector<int64_t>>(value));
      return store(SpatialList(std::get<std::vector<int64_t>>(value)));
    case kernel::FieldKind::kScalar:
      if (integer) return store(Scalar(*integer));
      if (real) return store(Scalar(*real));
      if (const auto* truth = std::get_if<bool>(&value)) return store(Scalar(*truth));
      expect(std::holds_alternative<Scalar>(value));
      return store(std::get<Scalar>(value));
  }
}

bool operator==(const Attrs& a, const Attrs& b) {
  if (a.type_ != b.type_) return false;
  if (!a.type_) return true;
  return std::all_of(a.type_->fields.begin(), a.type_->fields.end(), [&](const kernel::Field& field) {
    return visit_field(a, field, [&](const auto& value) {
      return Same{}(value, read<std::remove_cvref_t<decltype(value)>>(b, field));
    });
  });
}

size_t Attrs::hash() const {
  size_t seed = 0;
  if (!type_) return seed;
  for (const kernel::Field& field : type_->fields) Hash::combine(seed, visit_field(*this, field, Hash{}));
  return seed;
}

std::ostream& operator<<(std::ostream& out, const Attrs& attrs) {
  out << '{';
  if (attrs.type_) {
    for (const kernel::Field& field : attrs.type_->fields) {
      out << (&field == attrs.type_->fields.data() ? "" : ", ") << field.name << '=';
      visit_field(attrs, field, Print{out});
    }
  }
  return out << '}';
}

}  // namespace chorale
