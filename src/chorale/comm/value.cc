#include "chorale/comm/value.h"

#include <cstring>

#include "chorale/base/error.h"
#include "chorale/comm/call_builder.h"

namespace chorale::comm {
namespace {

// A byte says what follows; numbers are eight bytes, little-endian, and lengths too.
enum class Code : uint8_t { kNothing, kFalse, kTrue, kInteger, kNumber, kString, kTensor, kList, kMap, kRecord };

}  // namespace

Value::Value(List value) : data_(std::make_shared<const List>(std::move(value))) {}
Value::Value(Map value) : data_(std::make_shared<const Map>(std::move(value))) {}
Value::Value(Record value) : data_(std::make_shared<const Record>(std::move(value))) {}

template <class T>
const T& Value::as() const {
  if constexpr (std::is_same_v<T, List> || std::is_same_v<T, Map> || std::is_same_v<T, Record>) {
    const auto* found = std::get_if<std::shared_ptr<const T>>(&data_);
    CHORALE_CHECK(found, "[value] the value is something else than was asked for (alternative ", data_.index(), ")");
    return **found;
  } else {
    const auto* found = std::get_if<T>(&data_);
    CHORALE_CHECK(found, "[value] the value is something else than was asked for (alternative ", data_.index(), ")");
    return *found;
  }
}
template const bool& Value::as() const;
template const int64_t& Value::as() const;
template const double& Value::as() const;
template const std::string& Value::as() const;
template const Tensor& Value::as() const;
template const List& Value::as() const;
template const Map& Value::as() const;
template const Record& Value::as() const;

class ValueWriter {
 public:
  std::string text;

  void write(const Value& value, int depth) {
    CHORALE_CHECK(depth <= kMostValueDepth, "[value] nested deeper than ", kMostValueDepth, " levels");
    std::visit([&](const auto& data) { write_data(data, depth); }, value.data_);
    CHORALE_CHECK(text.size() <= kMostValueBytes, "[value] larger than ", kMostValueBytes, " bytes");
  }

 private:
  void code(Code code) { text += static_cast<char>(code); }
  void bytes(const void* data, size_t count) { text.append(static_cast<const char*>(data), count); }
  void number(uint64_t value) { bytes(&value, sizeof(value)); }
  void string(std::string_view value) {
    number(value.size());
    text += value;
  }
  void fields(const Map& map, int depth) {
    number(map.size());
    for (const auto& [key, value] : map) {
      string(key);
      write(value, depth + 1);
    }
  }

  void write_data(std::monostate, int) { code(Code::kNothing); }
  void write_data(bool value, int) { code(value ? Code::kTrue : Code::kFalse); }
  void write_data(int64_t value, int) {
    code(Code::kInteger);
    bytes(&value, sizeof(value));
  }
  void write_data(double value, int) {
    code(Code::kNumber);
    bytes(&value, sizeof(value));
  }
  void write_data(const std::string& value, int) {
    code(Code::kString);
    string(value);
  }
  void write_data(const Tensor& tensor, int) {
    CHORALE_CHECK(tensor.defined() && !tensor.is_sparse() && tensor.device() == kCpu,
                  "[value] a tensor that travels is dense and on the CPU");
    const size_t count = static_cast<size_t>(tensor.elems()) * tensor.elem_bytes();
    CHORALE_CHECK(count <= kMostValueBytes, "[value] a tensor of ", count, " bytes; send it by itself");
    code(Code::kTensor);
    text += static_cast<char>(tensor.dtype());
    text += static_cast<char>(tensor.dims());
    for (int64_t size : tensor.sizes()) number(static_cast<uint64_t>(size));
    const size_t at = text.size();
    text.resize(at + count);
    pack(tensor, text.data() + at);
  }
  void write_data(const std::shared_ptr<const List>& list, int depth) {
    code(Code::kList);
    number(list->size());
    for (const Value& value : *list) write(value, depth + 1);
  }
  void write_data(const std::shared_ptr<const Map>& map, int depth) {
    code(Code::kMap);
    fields(*map, depth);
  }
  void write_data(const std::shared_ptr<const Record>& record, int depth) {
    code(Code::kRecord);
    string(record->type);
    fields(record->fields, depth);
  }
};

namespace {

class ValueReader {
 public:
  explicit ValueReader(std::string_view text) : rest_(text) {}

  Value read(int depth) {
    check(depth <= kMostValueDepth);
    switch (static_cast<Code>(take(1)[0])) {
      case Code::kNothing:
        return {};
      case Code::kFalse:
        return false;
      case Code::kTrue:
        return true;
      case Code::kInteger:
        return static_cast<int64_t>(number());
      case Code::kNumber: {
        const uint64_t bits = number();
        double value;
        std::memcpy(&value, &bits, sizeof(value));
        return value;
      }
      case Code::kString:
        return string();
      case Code::kTensor:
        return tensor();
      case Code::kList: {
        List list;
        for (uint64_t left = count(); left > 0; --left) list.push_back(read(depth + 1));
        return list;
      }
      case Code::kMap:
        return fields(depth);
      case Code::kRecord: {
        Record record;
        record.type = string();
        record.fields = fields(depth);
        return record;
      }
    }
    check(false);
    return {};
  }
  void check_end() const { check(rest_.empty()); }

 private:
  static void check(bool good) { CHORALE_CHECK(good, "[value] these bytes are not an encoded value"); }
  std::string_view take(uint64_t bytes) {
    check(bytes <= rest_.size());
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }
  uint64_t number() {
    uint64_t value;
    std::memcpy(&value, take(8).data(), 8);
    return value;
  }
  // How many things follow, which take at least a byte each.
  uint64_t count() {
    const uint64_t value = number();
    check(value <= rest_.size());
    return value;
  }
  std::string string() { return std::string(take(number())); }
  Map fields(int depth) {
    Map map;
    for (uint64_t left = count(); left > 0; --left) {
      std::string key = string();
      check(map.emplace(std::move(key), read(depth + 1)).second);
    }
    return map;
  }
  Tensor tensor() {
    const std::string_view head = take(2);
    const auto dtype = static_cast<uint8_t>(head[0]);
    const auto rank = static_cast<uint8_t>(head[1]);
    check(dtype < kDTypeCount && rank <= kMaxDims);
    Shape sizes;
    // The product of sizes is bounded by the bytes that are there, so it cannot overflow.
    uint64_t elems = 1;
    bool empty = false;
    for (int d = 0; d < rank; ++d) {
      const uint64_t size = number();
      check(size <= kMostValueBytes);
      empty = empty || size == 0;
      sizes.push_back(static_cast<int64_t>(size));
    }
    for (int64_t size : sizes) {
      if (empty) break;
      elems *= static_cast<uint64_t>(size);
      check(elems <= rest_.size());
    }
    const Tensor result = Tensor::empty(sizes, static_cast<DType>(dtype));
    const std::string_view bytes = take(empty ? 0 : elems * result.elem_bytes());
    if (!bytes.empty()) std::memcpy(result.raw(), bytes.data(), bytes.size());
    return result;
  }

  std::string_view rest_;
};

}  // namespace

std::string encode(const Value& value) {
  ValueWriter writer;
  writer.write(value, 0);
  return std::move(writer.text);
}

Value decode(std::string_view text) {
  ValueReader reader(text);
  Value value = reader.read(0);
  reader.check_end();
  return value;
}

// The encoding is canonical: maps are sorted and tensors are packed.
bool operator==(const Value& a, const Value& b) { return encode(a) == encode(b); }

}  // namespace chorale::comm
