#include "chorale/json/json_write.h"

#include <charconv>
#include <cmath>
#include <iterator>

namespace chorale::json {
namespace {

class Writer {
 public:
  explicit Writer(Layout layout) : levels_(layout == Layout::kPages ? 2 : 0) {}

  std::string text;

  void write(const Value& value) {
    if (const auto* flag = value.as<bool>()) {
      text += *flag ? "true" : "false";
    } else if (const auto* whole = value.as<int64_t>()) {
      text += std::to_string(*whole);
    } else if (const auto* large = value.as<uint64_t>()) {
      text += std::to_string(*large);
    } else if (const auto* real = value.as<double>()) {
      write_real(*real);
    } else if (const auto* string = value.as<std::string>()) {
      text += quote(*string);
    } else if (const auto* array = value.as<Array>()) {
      write_members('[', ']', *array, [this](const Value& member) { write(member); });
    } else if (const auto* object = value.as<Object>()) {
      write_object(*object);
    } else {
      text += "null";
    }
  }
  void write_object(const Object& object) {
    write_members('{', '}', object, [this](const auto& member) {
      text += quote(member.first) + ": ";
      write(member.second);
    });
  }

 private:
  void write_real(double value) {
    if (!std::isfinite(value)) {
      text += "null";
      return;
    }
    char buffer[32];
    text.append(buffer, std::to_chars(buffer, std::end(buffer), value).ptr);
  }
  template <class Members, class Write>
  void write_members(char open, char close, const Members& members, const Write& write_one) {
    text += open;
    ++depth_;
    bool first = true;
    for (const auto& member : members) {
      if (!first) text += depth_ > levels_ ? ", " : ",";
      if (depth_ <= levels_) new_line();
      write_one(member);
      first = false;
    }
    --depth_;
    if (depth_ < levels_ && !members.empty()) new_line();
    text += close;
  }
  void new_line() { text += '\n' + std::string(2 * depth_, ' '); }

  size_t levels_;  // whose members have lines of their own
  size_t depth_ = 0;
};

}  // namespace

std::string write(const Value& value, Layout layout) {
  Writer writer(layout);
  writer.write(value);
  return std::move(writer.text);
}
std::string write(const Object& object, Layout layout) {
  Writer writer(layout);
  writer.write_object(object);
  return std::move(writer.text);
}

}  // namespace chorale::json
