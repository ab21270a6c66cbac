// Values that travel between ranks: numbers, strings, lists, maps, records and tensors, nested. Data only, never code.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale::comm {

class Value;
using List = std::vector<Value>;
using Map = std::map<std::string, Value>;
// A struct: the name of its type and its fields.
struct Record;

class Value {
 public:
  Value() = default;                                       // nothing
  Value(bool value) : data_(value) {}                      // NOLINT(google-explicit-constructor)
  Value(int64_t value) : data_(value) {}                   // NOLINT(google-explicit-constructor)
  Value(int value) : data_(int64_t{value}) {}              // NOLINT(google-explicit-constructor)
  Value(double value) : data_(value) {}                    // NOLINT(google-explicit-constructor)
  Value(std::string value) : data_(std::move(value)) {}    // NOLINT(google-explicit-constructor)
  Value(const char* value) : data_(std::string(value)) {}  // NOLINT(google-explicit-constructor)
  Value(Tensor value) : data_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Value(List value);                                       // NOLINT(google-explicit-constructor)
  Value(Map value);                                        // NOLINT(google-explicit-constructor)
  Value(Record value);                                     // NOLINT(google-explicit-constructor)

  // The value as T; InvalidArgument when it is something else.
  template <class T>
  const T& as() const;
  bool is_nothing() const { return std::holds_alternative<std::monostate>(data_); }

  // Tensors are equal when dtype, shape and bytes are.
  friend bool operator==(const Value& a, const Value& b);

 private:
  friend class ValueWriter;
  // Lists, maps and records are shared and never change, so copies are cheap.
  using Data = std::variant<std::monostate, bool, int64_t, double, std::string, Tensor, std::shared_ptr<const List>,
                            std::shared_ptr<const Map>, std::shared_ptr<const Record>>;
  Data data_;
};

struct Record {
  std::string type;
  Map fields;
};

inline constexpr int kMostValueDepth = 64;
inline constexpr size_t kMostValueBytes = size_t{1} << 30;

// Throws InvalidArgument for what cannot travel: nested deeper or larger than the bounds, a tensor that is undefined,
// sparse or not on the CPU.
std::string encode(const Value& value);
// Throws InvalidArgument for anything that encode() does not make; never reads outside the text, and never makes more
// than it holds.
Value decode(std::string_view text);

}  // namespace chorale::comm
