// How values become messages. Which types can travel is known at compile time: numbers, enums, strings, tensors (sparse
// ones too), containers, optionals, pairs, tuples, remote references, and structs that list all their fields once:
//
//   struct Batch {
//     Tensor images;
//     std::vector<std::string> names;
//     CHORALE_MESSAGE(Batch, images, names)
//   };
//
// A type that cannot travel does not compile. Nothing that is read is trusted: sizes, counts and depths are bounded
// before memory is taken, and an InvalidArgument says what is wrong.
#pragma once

#include <algorithm>
#include <array>
#include <complex>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/base/list_fields.h"
#include "chorale/kernel/attrs.h"
#include "chorale/tensor/tensor.h"

namespace chorale::rpc {

class Core;
class FutureState;
using Bytes = std::vector<std::byte>;

inline constexpr int kMostDepth = 64;
// Elements that take no bytes (empty structs) cannot be bounded by the size of the message.
inline constexpr uint64_t kMostEmptyElements = 1 << 16;

// The references that a message passes on, in order. Those that its receiver has not taken come back when this goes:
// the message was not sent, or what it asked for was refused before they were read. One thread at a time.
class PassedOn {
 public:
  explicit PassedOn(std::weak_ptr<Core> core) : core_(std::move(core)) {}
  ~PassedOn();
  PassedOn(const PassedOn&) = delete;
  PassedOn& operator=(const PassedOn&) = delete;

  void add(uint64_t reference, uint64_t fork) { numbers_.emplace_back(reference, fork); }
  // The receiver has the first ones, or all of them.
  void take(size_t count) { taken_ = std::min(count, numbers_.size()); }
  void take_all() { taken_ = numbers_.size(); }

 private:
  const std::weak_ptr<Core> core_;
  std::vector<std::pair<uint64_t, uint64_t>> numbers_;  // each reference, and its fork for the receiver
  size_t taken_ = 0;
};

// Writes the values of a message: small ones one after the other; tensors apart, because they carry history and may be
// large.
class Writer {
 public:
  // `core` and `to` are for remote references, which are counted for the worker that gets them; without them, these
  // throw.
  explicit Writer(Core* core = nullptr, int to = -1) : core_(core), to_(to) {}

  void raw(const void* data, size_t bytes) {
    const auto* first = static_cast<const std::byte*>(data);
    payload.insert(payload.end(), first, first + bytes);
  }
  template <class T>
  requires std::is_trivially_copyable_v<T>
  void number(T value) { raw(&value, sizeof value); }
  void tensor(const Tensor& x);
  Core* core() const { return core_; }
  int to() const { return to_; }

  Bytes payload;
  std::vector<Tensor> tensors;
  std::shared_ptr<PassedOn> passed;  // null: no references

 private:
  Core* core_;
  int to_;
};

class Reader {
 public:
  Reader(std::span<const std::byte> payload, std::span<const Tensor> tensors, Core* core = nullptr, int from = -1)
      : payload_(payload), tensors_(tensors), core_(core), from_(from) {}

  void raw(void* data, size_t bytes) {
    need(bytes);
    if (bytes > 0) std::memcpy(data, payload_.data(), bytes);
    payload_ = payload_.subspan(bytes);
  }
  template <class T>
  requires std::is_trivially_copyable_v<T> T number() {
    T value;
    raw(&value, sizeof value);
    return value;
  }
  Tensor tensor();
  // A count of things that take at least this many bytes each.
  size_t count(size_t bytes_each);
  size_t left() const { return payload_.size(); }
  // Throws unless everything was read.
  void finish() const;
  Core* core() const { return core_; }
  int from() const { return from_; }
  // What must be complete before the values may be used: remote references that their owners do not know yet.
  std::vector<std::shared_ptr<FutureState>>& gates() { return gates_; }
  // References that were taken so far.
  size_t references() const { return references_; }
  void note_reference() { ++references_; }

  // Around what is nested.
  class Deeper {
   public:
    explicit Deeper(Reader& reader) : reader_(reader) {
      CHORALE_CHECK(++reader_.depth_ <= kMostDepth, "[rpc] a message is nested deeper than ", kMostDepth, " levels");
    }
    ~Deeper() { --reader_.depth_; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;

   private:
    Reader& reader_;
  };

 private:
  void need(size_t bytes) const;

  std::span<const std::byte> payload_;
  std::span<const Tensor> tensors_;
  size_t next_tensor_ = 0;
  int depth_ = 0;
  Core* core_;
  int from_;
  size_t references_ = 0;
  std::vector<std::shared_ptr<FutureState>> gates_;
};

// Has for each type name() for signatures and errors, kLeast (bytes that a value takes at least), write() and read().
template <class T>
struct Codec;

namespace detail {
template <class T>
concept HasMessageFields = requires {
  typename T::ChoraleMessageFields;
};
template <class T>
concept HasAttributes = requires {
  attrs_type(base::TypeTag<T>{});
};
template <class T>
concept Number = std::is_arithmetic_v<T> || std::is_enum_v<T>;
}  // namespace detail

// Whether values of this type can travel.
template <class T>
concept Sendable = requires(Writer& writer, Reader& reader, const T& value) {
  { Codec<T>::name() } -> std::convertible_to<std::string>;
  Codec<T>::write(writer, value);
  { Codec<T>::read(reader) } -> std::same_as<T>;
};

template <class T>
void write(Writer& writer, const T& value) {
  Codec<T>::write(writer, value);
}
template <class T>
T read(Reader& reader) {
  return Codec<T>::read(reader);
}

// ---- numbers

template <detail::Number T>
struct Codec<T> {
  static constexpr size_t kLeast = sizeof(T);
  static std::string name() {
    if constexpr (std::is_same_v<T, bool>) return "bool";
    return concat(std::is_enum_v<T>             ? "enum"
                  : std::is_floating_point_v<T> ? "f"
                  : std::is_signed_v<T>         ? "i"
                                                : "u",
                  8 * sizeof(T));
  }
  static void write(Writer& writer, T value) { writer.number(value); }
  static T read(Reader& reader) {
    if constexpr (std::is_same_v<T, bool>) {
      const auto byte = reader.number<uint8_t>();
      CHORALE_CHECK(byte <= 1, "[rpc] a truth value is ", int{byte});
      return byte == 1;
    } else {
      return reader.number<T>();
    }
  }
};

template <>
struct Codec<DType> {
  static constexpr size_t kLeast = 1;
  static std::string name() { return "dtype"; }
  static void write(Writer& writer, DType value) { writer.number(value); }
  static DType read(Reader& reader) {
    const auto value = reader.number<uint8_t>();
    CHORALE_CHECK(value < kDTypeCount, "[rpc] there is no dtype ", int{value});
    return static_cast<DType>(value);
  }
};

template <class T>
struct Codec<std::complex<T>> {
  static constexpr size_t kLeast = 2 * sizeof(T);
  static std::string name() { return concat("c", 16 * sizeof(T)); }
  static void write(Writer& writer, std::complex<T> value) {
    writer.number(value.real());
    writer.number(value.imag());
  }
  static std::complex<T> read(Reader& reader) {
    const T real = reader.number<T>();
    return {real, reader.number<T>()};
  }
};

template <>
struct Codec<std::monostate> {
  static constexpr size_t kLeast = 0;
  static std::string name() { return "nothing"; }
  static void write(Writer&, std::monostate) {}
  static std::monostate read(Reader&) { return {}; }
};

// ---- strings and tensors

template <>
struct Codec<std::string> {
  static constexpr size_t kLeast = 8;
  static std::string name() { return "string"; }
  static void write(Writer& writer, const std::string& value) {
    writer.number<uint64_t>(value.size());
    writer.raw(value.data(), value.size());
  }
  static std::string read(Reader& reader) {
    std::string value(reader.count(1), '\0');
    reader.raw(value.data(), value.size());
    return value;
  }
};

template <>
struct Codec<Tensor> {
  static constexpr size_t kLeast = 1;
  static std::string name() { return "tensor"; }
  static void write(Writer& writer, const Tensor& value) { writer.tensor(value); }
  static Tensor read(Reader& reader) { return reader.tensor(); }
};

// ---- containers

namespace detail {

template <class Container>
struct ListCodec {
  using Element = typename Container::value_type;
  static constexpr size_t kLeast = 8;
  static void write(Writer& writer, const Container& values) {
    writer.number<uint64_t>(values.size());
    if constexpr (kIsPlain) {
      writer.raw(values.data(), values.size() * sizeof(Element));
    } else {
      for (const auto& value : values) Codec<Element>::write(writer, value);
    }
  }
  static Container read(Reader& reader) {
    const Reader::Deeper deeper(reader);
    const size_t count = reader.count(Codec<Element>::kLeast);
    Container values;
    if constexpr (kIsPlain) {
      values.resize(count);
      reader.raw(values.data(), count * sizeof(Element));
    } else {
      for (size_t i = 0; i < count; ++i) values.insert(values.end(), Codec<Element>::read(reader));
    }
    return values;
  }

 private:
  static constexpr bool kIsPlain =
      std::is_arithmetic_v<Element> && !std::is_same_v<Element, bool> && requires(Container & c) {
    c.data();
  };
};

template <class Map>
struct MapCodec {
  using Key = typename Map::key_type;
  using Mapped = typename Map::mapped_type;
  static constexpr size_t kLeast = 8;
  static std::string name() { return concat("map<", Codec<Key>::name(), ",", Codec<Mapped>::name(), ">"); }
  static void write(Writer& writer, const Map& values) {
    writer.number<uint64_t>(values.size());
    for (const auto& [key, mapped] : values) {
      Codec<Key>::write(writer, key);
      Codec<Mapped>::write(writer, mapped);
    }
  }
  static Map read(Reader& reader) {
    const Reader::Deeper deeper(reader);
    const size_t count = reader.count(Codec<Key>::kLeast + Codec<Mapped>::kLeast);
    Map values;
    for (size_t i = 0; i < count; ++i) {
      Key key = Codec<Key>::read(reader);
      CHORALE_CHECK(values.emplace(std::move(key), Codec<Mapped>::read(reader)).second, "[rpc] a map has a key twice");
    }
    return values;
  }
};

}  // namespace detail

template <Sendable T>
struct Codec<std::vector<T>> : detail::ListCodec<std::vector<T>> {
  static std::string name() { return concat("list<", Codec<T>::name(), ">"); }
};
template <Sendable T, size_t N>
struct Codec<SmallVector<T, N>> : detail::ListCodec<SmallVector<T, N>> {
  static std::string name() { return concat("list<", Codec<T>::name(), ">"); }
  static SmallVector<T, N> read(Reader& reader) {
    const Reader::Deeper deeper(reader);
    SmallVector<T, N> values;
    for (size_t left = reader.count(Codec<T>::kLeast); left > 0; --left) values.push_back(Codec<T>::read(reader));
    return values;
  }
};
template <Sendable T>
struct Codec<std::set<T>> : detail::ListCodec<std::set<T>> {
  static std::string name() { return concat("set<", Codec<T>::name(), ">"); }
};
template <Sendable Key, Sendable Mapped>
struct Codec<std::map<Key, Mapped>> : detail::MapCodec<std::map<Key, Mapped>> {};
template <Sendable Key, Sendable Mapped>
struct Codec<std::unordered_map<Key, Mapped>> : detail::MapCodec<std::unordered_map<Key, Mapped>> {};

template <Sendable T, size_t N>
struct Codec<std::array<T, N>> {
  static constexpr size_t kLeast = N * Codec<T>::kLeast;
  static std::string name() { return concat("array<", Codec<T>::name(), ",", N, ">"); }
  static void write(Writer& writer, const std::array<T, N>& values) {
    for (const T& value : values) Codec<T>::write(writer, value);
  }
  static std::array<T, N> read(Reader& reader) {
    const Reader::Deeper deeper(reader);
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return std::array<T, N>{(static_cast<void>(I), Codec<T>::read(reader))...};
    }
    (std::make_index_sequence<N>());
  }
};

template <Sendable T>
struct Codec<std::optional<T>> {
  static constexpr size_t kLeast = 1;
  static std::string name() { return concat("optional<", Codec<T>::name(), ">"); }
  static void write(Writer& writer, const std::optional<T>& value) {
    Codec<bool>::write(writer, value.has_value());
    if (value) Codec<T>::write(writer, *value);
  }
  static std::optional<T> read(Reader& reader) {
    const Reader::Deeper deeper(reader);
    if (!Codec<bool>::read(reader)) return std::nullopt;
    return Codec<T>::read(reader);
  }
};

template <Sendable... Ts>
struct Codec<std::tuple<Ts...>> {
  static constexpr size_t kLeast = (size_t{0} + ... + Codec<Ts>::kLeast);
  static std::string name() {
    std::string names;
    ((names += (names.empty() ? "" : ",") + Codec<Ts>::name()), ...);
    return "(" + names + ")";
  }
  static void write(Writer& writer, const std::tuple<Ts...>& values) {
    std::apply([&](const Ts&... value) { (Codec<Ts>::write(writer, value), ...); }, values);
  }
  static std::tuple<Ts...> read([[maybe_unused]] Reader& reader) {
    const Reader::Deeper deeper(reader);
    return std::tuple<Ts...>{Codec<Ts>::read(reader)...};  // braces: from left to right
  }
};
template <Sendable A, Sendable B>
struct Codec<std::pair<A, B>> {
  static constexpr size_t kLeast = Codec<A>::kLeast + Codec<B>::kLeast;
  static std::string name() { return concat("(", Codec<A>::name(), ",", Codec<B>::name(), ")"); }
  static void write(Writer& writer, const std::pair<A, B>& value) {
    Codec<A>::write(writer, value.first);
    Codec<B>::write(writer, value.second);
  }
  static std::pair<A, B> read(Reader& reader) {
    const Reader::Deeper deeper(reader);
    A first = Codec<A>::read(reader);
    return {std::move(first), Codec<B>::read(reader)};
  }
};

// ---- structs

template <detail::HasMessageFields T>
struct Codec<T> {
  static constexpr size_t kLeast = 0;
  // The name has the types of its fields: another program may have another struct of that name.
  static std::string name() {
    constinit thread_local bool names_fields = false;
    if (names_fields) return T::kMessageName;  // it has references to its own kind
    struct Scope {
      ~Scope() { names_fields = false; }
    } const scope;
    names_fields = true;
    std::string fields;
    T value{};
    visit_fields(value, [&](const auto& field) {
      fields += concat(fields.empty() ? "" : ",", Codec<std::remove_cvref_t<decltype(field)>>::name());
    });
    return concat(T::kMessageName, "{", fields, "}");
  }
  static void write(Writer& writer, const T& value) {
    visit_fields(value, [&](const auto& field) { rpc::write(writer, field); });
  }
  static T read(Reader& reader) {
    const Reader::Deeper deeper(reader);
    T value{};
    visit_fields(value, [&](auto& field) { field = rpc::read<std::remove_reference_t<decltype(field)>>(reader); });
    return value;
  }
};

// Options of optimizers and attributes of ops list their fields already.
void write_attributes(Writer& writer, const Attrs& attributes);
Attrs read_attributes(Reader& reader, const kernel::AttrsType& type);
template <detail::HasAttributes T>
struct Codec<T> {
  static constexpr size_t kLeast = 8;
  static std::string name() { return attrs_type(base::TypeTag<T>{}).name; }
  static void write(Writer& writer, const T& value) { write_attributes(writer, Attrs(value)); }
  static T read(Reader& reader) { return read_attributes(reader, attrs_type(base::TypeTag<T>{})).template get<T>(); }
};

}  // namespace chorale::rpc

// Inside a struct: all of its fields. What looks for tensors in it (nn/visit_tensors.h) sees them too.
#define CHORALE_MESSAGE(Type, ...)                                    \
  using ChoraleMessageFields = Type;                                  \
  [[maybe_unused]] static constexpr const char* kMessageName = #Type; \
  CHORALE_LIST_FIELDS(Type, __VA_ARGS__)
