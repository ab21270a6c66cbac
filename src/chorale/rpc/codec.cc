#include "chorale/rpc/codec.h"

namespace chorale::rpc {

void Writer::tensor(const Tensor& x) {
  number<uint8_t>(x.defined() ? 1 : 0);
  if (x.defined()) tensors.push_back(x);
}

void Reader::need(size_t bytes) const {
  CHORALE_CHECK(bytes <= payload_.size(), "[rpc] a message ends early: ", bytes, " bytes are needed, ", payload_.size(),
                " are left");
}

size_t Reader::count(size_t bytes_each) {
  const auto count = number<uint64_t>();
  const uint64_t most = bytes_each == 0 ? kMostEmptyElements : payload_.size() / bytes_each;
  CHORALE_CHECK(count <= most, "[rpc] a message promises ", count, " elements and has room for ", most);
  return count;
}

Tensor Reader::tensor() {
  const auto defined = number<uint8_t>();
  CHORALE_CHECK(defined <= 1, "[rpc] a tensor is marked with ", int{defined});
  if (defined == 0) return {};
  CHORALE_CHECK(next_tensor_ < tensors_.size(), "[rpc] a message has ", tensors_.size(), " tensors and refers to more");
  return tensors_[next_tensor_++];
}

void Reader::finish() const {
  CHORALE_CHECK(payload_.empty(), "[rpc] ", payload_.size(), " bytes of a message were not read");
  CHORALE_CHECK(next_tensor_ == tensors_.size(), "[rpc] ", tensors_.size() - next_tensor_,
                " tensors of a message were not read");
}

namespace {

// The values of fields, by the place of their type in FieldValue.
void write_field(Writer& writer, const kernel::FieldValue& value) {
  writer.number(static_cast<uint8_t>(value.index()));
  std::visit(
      [&](const auto& held) {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<T, Scalar>) {
          writer.number(static_cast<uint8_t>(held.kind()));
          writer.number(held.kind() == Scalar::Kind::kInt || held.kind() == Scalar::Kind::kBool ? held.integer() : 0);
          writer.number(held.real());
          writer.number(held.imag());
        } else {
          write(writer, held);
        }
      },
      value);
}

Scalar read_scalar(Reader& reader) {
  const auto kind = reader.number<uint8_t>();
  const auto integer = reader.number<int64_t>();
  const auto real = reader.number<double>(), imag = reader.number<double>();
  switch (static_cast<Scalar::Kind>(kind)) {
    case Scalar::Kind::kBool:
      return integer != 0;
    case Scalar::Kind::kInt:
      return integer;
    case Scalar::Kind::kFloat:
      return real;
    case Scalar::Kind::kComplex:
      return complex128(real, imag);
  }
  throw InvalidArgument(concat("[rpc] a scalar is of kind ", int{kind}));
}

template <size_t I = 0>
kernel::FieldValue read_field(Reader& reader, uint8_t index) {
  if constexpr (I == std::variant_size_v<kernel::FieldValue>) {
    throw InvalidArgument(concat("[rpc] an attribute is of kind ", int{index}));
  } else {
    if (index != I) return read_field<I + 1>(reader, index);
    using T = std::variant_alternative_t<I, kernel::FieldValue>;
    if constexpr (std::is_same_v<T, Scalar>) {
      return read_scalar(reader);
    } else {
      return read<T>(reader);
    }
  }
}

}  // namespace

void write_attributes(Writer& writer, const Attrs& attributes) {
  writer.number<uint64_t>(attributes.type() ? attributes.type()->fields.size() : 0);
  if (!attributes.type()) return;
  for (const kernel::Field& field : attributes.type()->fields) {
    write<std::string>(writer, field.name);
    write_field(writer, attributes.at(field));
  }
}

Attrs read_attributes(Reader& reader, const kernel::AttrsType& type) {
  Attrs attributes(type);
  const size_t count = reader.count(Codec<std::string>::kLeast + 1);
  CHORALE_CHECK(count == type.fields.size(), "[rpc] ", type.name, " has ", type.fields.size(), " fields, not ", count);
  for (size_t i = 0; i < count; ++i) {
    const auto name = read<std::string>(reader);
    attributes.set(name, read_field(reader, reader.number<uint8_t>()));
  }
  return attributes;
}

}  // namespace chorale::rpc
