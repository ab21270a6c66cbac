// JSON from files and messages that nobody vouches for: strict (UTF-8, no duplicate keys, nothing behind the value) and
// bounded. The order of keys is kept.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace chorale::json {

class Value;
using Array = std::vector<Value>;
using Object = std::vector<std::pair<std::string, Value>>;

class Value {
 public:
  // An integer that fits into neither int64_t nor uint64_t is a double; so is everything written with a point or an
  // exponent.
  using Data = std::variant<std::nullptr_t, bool, int64_t, uint64_t, double, std::string, Array, Object>;

  Value() = default;
  explicit Value(Data data) : data_(std::move(data)) {}

  // What it is, or null when it is something else.
  template <class T>
  const T* as() const {
    return std::get_if<T>(&data_);
  }
  // "an object", "a string", …: for messages.
  const char* kind() const;

  // Throw InvalidArgument, naming `what`, when it is something else.
  const Object& object(std::string_view what) const;
  const Array& array(std::string_view what) const;
  const std::string& string(std::string_view what) const;
  // A number without point or exponent from 0 to 2^63 - 1.
  int64_t size(std::string_view what) const;

  template <class T>
  T* mutable_as() {
    return std::get_if<T>(&data_);
  }

 private:
  Data data_;
};

// The value of a key, or null.
const Value* find(const Object& object, std::string_view key);

struct Limits {
  size_t bytes = 100'000'000;
  size_t depth = 16;
};
// `what` is the file or message that errors name. Throws InvalidArgument.
Value parse(std::string_view what, std::string_view text, const Limits& limits = {});

// Text as a JSON string, with its quotes; throws InvalidArgument when it is not UTF-8.
std::string quote(std::string_view text);

}  // namespace chorale::json
