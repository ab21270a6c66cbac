#include "chorale/json/json.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "chorale/base/error.h"

namespace chorale::json {
namespace {

// Builds Values from the parser's events. Objects and arrays that are open live on a stack, so that nesting costs no
// recursion.
class Sax final : public nlohmann::json_sax<nlohmann::json> {
 public:
  Sax(std::string_view what, size_t max_depth) : what_(what), max_depth_(max_depth) {}

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(int64_t value) override { return add(value); }
  bool number_unsigned(uint64_t value) override {
    if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return add(static_cast<int64_t>(value));
    return add(value);
  }
  bool number_float(double value, const std::string&) override { return add(value); }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool binary(nlohmann::json::binary_t&) override { return false; }
  bool start_object(size_t) override { return open(Object()); }
  bool key(std::string& key) override {
    open_.back().key = std::move(key);
    return true;
  }
  bool end_object() override {
    check_keys(*open_.back().value.as<Object>());
    return close();
  }
  bool start_array(size_t) override { return open(Array()); }
  bool end_array() override { return close(); }
  bool parse_error(size_t at, const std::string& token, const nlohmann::json::exception&) override {
    detail::raise<InvalidArgument>("[json] ", what_, " is not JSON: unexpected ", printable(token), " at byte ", at);
  }

  Value take() { return std::move(result_); }

 private:
  struct Open {
    Value value;
    std::string key;  // of the member that comes next
  };

  static std::string printable(const std::string& token) {
    if (token.empty()) return "end";
    std::string result = "'" + token.substr(token.size() > 40 ? token.size() - 40 : 0) + "'";
    std::replace_if(
        result.begin(), result.end(), [](char c) { return c < 0x20 || c > 0x7e; }, '?');
    return result;
  }

  bool open(Value::Data empty) {
    CHORALE_CHECK(open_.size() < max_depth_, "[json] ", what_, " is nested more than ", max_depth_, " levels deep");
    open_.push_back({Value(std::move(empty)), {}});
    return true;
  }
  bool close() {
    Value value = std::move(open_.back().value);
    open_.pop_back();
    place(std::move(value));
    return true;
  }
  bool add(Value::Data data) {
    place(Value(std::move(data)));
    return true;
  }
  void place(Value value) {
    if (open_.empty()) {
      result_ = std::move(value);
    } else if (auto* members = open_.back().value.mutable_as<Object>()) {
      members->emplace_back(std::move(open_.back().key), std::move(value));
    } else {
      open_.back().value.mutable_as<Array>()->push_back(std::move(value));
    }
  }
  void check_keys(const Object& object) {
    std::vector<std::string_view> keys;
    keys.reserve(object.size());
    for (const auto& [key, value] : object) keys.push_back(key);
    std::sort(keys.begin(), keys.end());
    const auto twin = std::adjacent_find(keys.begin(), keys.end());
    CHORALE_CHECK(twin == keys.end(), "[json] ", what_, " has the key \"", *twin, "\" twice");
  }

  const std::string_view what_;
  const size_t max_depth_;
  std::vector<Open> open_;
  Value result_;
};

template <class T>
const T& expect(const Value& value, const char* wanted, std::string_view what) {
  const T* found = value.as<T>();
  CHORALE_CHECK(found, "[json] ", what, " should be ", wanted, ", but is ", value.kind());
  return *found;
}

}  // namespace

const char* Value::kind() const {
  constexpr const char* kKinds[] = {"null",          "a bool",   "an integer", "a large integer",
                                    "a real number", "a string", "an array",   "an object"};
  return kKinds[data_.index()];
}

const Object& Value::object(std::string_view what) const { return expect<Object>(*this, "an object", what); }
const Array& Value::array(std::string_view what) const { return expect<Array>(*this, "an array", what); }
const std::string& Value::string(std::string_view what) const { return expect<std::string>(*this, "a string", what); }
int64_t Value::size(std::string_view what) const {
  const int64_t value = expect<int64_t>(*this, "an integer from 0 to 2^63 - 1", what);
  CHORALE_CHECK(value >= 0, "[json] ", what, " should not be negative, but is ", value);
  return value;
}

const Value* find(const Object& object, std::string_view key) {
  const auto found =
      std::find_if(object.begin(), object.end(), [&](const auto& member) { return member.first == key; });
  return found == object.end() ? nullptr : &found->second;
}

Value parse(std::string_view what, std::string_view text, const Limits& limits) {
  CHORALE_CHECK(text.size() <= limits.bytes, "[json] ", what, " has ", text.size(), " bytes; at most ", limits.bytes,
                " are read");
  Sax sax(what, limits.depth);
  nlohmann::json::sax_parse(text.begin(), text.end(), &sax);
  return sax.take();
}

std::string quote(std::string_view text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    detail::raise<InvalidArgument>("[json] a text of ", text.size(), " bytes is not UTF-8, so JSON cannot hold it");
  }
}

}  // namespace chorale::json
