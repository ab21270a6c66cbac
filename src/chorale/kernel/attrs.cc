#include "chorale/kernel/attrs.h"

#include <algorithm>
#include <ostream>

namespace chorale {
namespace {

template <class T>
const T& read(const Attrs& attrs, const Field& field) {
  return *reinterpret_cast<const T*>(static_cast<const std::byte*>(attrs.bytes()) + field.offset);
}

std::string known_fields(const AttrsType& type) {
  std::string names;
  for (const Field& field : type.fields) names += (names.empty() ? "" : ", ") + std::string(field.name);
  return names;
}

void combine(size_t& seed, size_t value) { seed ^= value + 0x9e3779b97f4a7c15u + (seed << 6) + (seed >> 2); }

struct Print {
  std::ostream& out;
  void operator()(bool value) const { out << (value ? "true" : "false"); }
  void operator()(int64_t value) const { out << value; }
  void operator()(double value) const { out << value; }
  void operator()(const std::string& value) const { out << value; }
  void operator()(const std::vector<int64_t>& value) const { out << Shape(std::span<const int64_t>(value)); }
  void operator()(const Scalar& value) const { out << value; }
};

struct Hash {
  size_t operator()(const std::vector<int64_t>& value) const {
    size_t seed = value.size();
    for (int64_t v : value) combine(seed, std::hash<int64_t>()(v));
    return seed;
  }
  size_t operator()(const Scalar& value) const {
    size_t seed = std::hash<double>()(value.real());
    combine(seed, std::hash<double>()(value.imag()));
    return seed;
  }
  template <class T>
  size_t operator()(const T& value) const {
    return std::hash<T>()(value);
  }
};

}  // namespace

FieldValue Attrs::at(const Field& field) const {
  switch (field.kind) {
    case FieldKind::kBool:
      return read<bool>(*this, field);
    case FieldKind::kI64:
      return read<int64_t>(*this, field);
    case FieldKind::kF64:
      return read<double>(*this, field);
    case FieldKind::kDType:
      return std::string(name_of(read<DType>(*this, field)));
    case FieldKind::kEnum:
      return static_cast<int64_t>(read<uint8_t>(*this, field));
    case FieldKind::kInts: {
      const auto& list = read<IntList>(*this, field);
      return std::vector<int64_t>(list.begin(), list.end());
    }
    case FieldKind::kScalar:
      return read<Scalar>(*this, field);
  }
  return false;
}

void Attrs::set(std::string_view name, const FieldValue& value) {
  CHORALE_CHECK(type_, "[attributes] there are none, so there is no '", name, "'");
  const auto* field = std::find_if(type_->fields.data(), type_->fields.data() + type_->fields.size(),
                                   [&](const Field& f) { return name == f.name; });
  CHORALE_CHECK(field != type_->fields.data() + type_->fields.size(), "[", type_->name, "] has no field '", name, "'; known: ",
                known_fields(*type_));
  std::byte* at = bytes_ + field->offset;
  const auto expect = [&](bool fits) {
    CHORALE_CHECK(fits, "[", type_->name, "] the value for '", name, "' has the wrong kind");
  };
  const auto store = [&](const auto& v) { std::memcpy(at, &v, sizeof(v)); };
  const auto* integer = std::get_if<int64_t>(&value);
  const auto* real = std::get_if<double>(&value);
  switch (field->kind) {
    case FieldKind::kBool:
      expect(std::holds_alternative<bool>(value));
      return store(std::get<bool>(value));
    case FieldKind::kI64:
      expect(integer);
      return store(*integer);
    case FieldKind::kF64:
      expect(integer || real);
      return store(real ? *real : static_cast<double>(*integer));
    case FieldKind::kDType:
      expect(std::holds_alternative<std::string>(value));
      return store(dtype_from_name(std::get<std::string>(value)));
    case FieldKind::kEnum:
      expect(integer);
      return store(static_cast<uint8_t>(*integer));
    case FieldKind::kInts:
      expect(std::holds_alternative<std::vector<int64_t>>(value));
      return store(IntList(std::get<std::vector<int64_t>>(value)));
    case FieldKind::kScalar:
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
  return std::all_of(a.type_->fields.begin(), a.type_->fields.end(), [&](const Field& f) { return a.at(f) == b.at(f); });
}

size_t Attrs::hash() const {
  size_t seed = 0;
  if (!type_) return seed;
  for (const Field& field : type_->fields) combine(seed, std::visit(Hash{}, at(field)));
  return seed;
}

std::ostream& operator<<(std::ostream& out, const Attrs& attrs) {
  out << '{';
  if (attrs.type_) {
    for (const Field& field : attrs.type_->fields) {
      out << (&field == attrs.type_->fields.data() ? "" : ", ") << field.name << '=';
      std::visit(Print{out}, attrs.at(field));
    }
  }
  return out << '}';
}

}  // namespace chorale
