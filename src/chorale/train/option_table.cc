#include "chorale/train/option_table.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "chorale/base/did_you_mean.h"
#include "chorale/base/error.h"
#include "chorale/base/printable.h"
#include "chorale/json/json_write.h"

namespace chorale::train {
namespace {

std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

template <class T>
std::optional<T> number_of(const std::string& word) {
  T value{};
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) return {};
  return value;
}

// The number as short as it can be; a whole number has no exponent, and is no larger than there are.
std::string text_of_number(double value, bool whole) {
  constexpr double kLargest = 9.2e18;
  if (whole && value > kLargest) return std::to_string(std::numeric_limits<int64_t>::max());
  if (std::abs(value) < kLargest && value == std::floor(value) && std::abs(value) < 1e15)
    return std::to_string(static_cast<int64_t>(value));
  return concat(value);
}

json::Value value_of(const Option& row) {
  return std::visit(
      [](const auto* target) {
        if constexpr (std::is_same_v<decltype(target), const std::vector<std::string>*>) {
          json::Array words;
          for (const std::string& word : *target) words.emplace_back(word);
          return json::Value(std::move(words));
        } else {
          return json::Value(*target);
        }
      },
      row.target);
}

template <class T>
void read_value(bool* target, const json::Value& value, const T& wrong) {
  if (!value.as<bool>()) wrong("true or false");
  *target = *value.as<bool>();
}
template <class T>
void read_value(int64_t* target, const json::Value& value, const T& wrong) {
  if (!value.as<int64_t>()) wrong("a whole number");
  *target = *value.as<int64_t>();
}
template <class T>
void read_value(double* target, const json::Value& value, const T& wrong) {
  if (const auto* whole = value.as<int64_t>()) {
    *target = static_cast<double>(*whole);
  } else if (const auto* real = value.as<double>()) {
    *target = *real;
  } else {
    wrong("a number");
  }
}
template <class T>
void read_value(std::string* target, const json::Value& value, const T& wrong) {
  if (!value.as<std::string>()) wrong("a string");
  *target = *value.as<std::string>();
}
template <class T>
void read_value(std::vector<std::string>* target, const json::Value& value, const T& wrong) {
  if (!value.as<json::Array>()) wrong("a list of strings");
  target->clear();
  for (const json::Value& word : *value.as<json::Array>()) {
    if (!word.as<std::string>()) wrong("a list of strings");
    target->push_back(*word.as<std::string>());
  }
}

}  // namespace

void OptionTable::add(Option row) { rows_.push_back(std::move(row)); }

const Option& OptionTable::row(std::string_view name, const std::string& what) const {
  const auto found = std::find_if(rows_.begin(), rows_.end(), [&](const Option& row) { return row.name == name; });
  if (found != rows_.end()) return *found;
  std::vector<std::string> names;
  for (const Option& row : rows_) names.push_back(row.name);
  throw InvalidArgument(concat(what, ": there is no option '", name, "'", did_you_mean(name, names)));
}

std::string range_of(const Option& row) {
  const bool whole = std::holds_alternative<int64_t*>(row.target);
  return concat(whole ? "a whole number" : "a number", " from ", text_of_number(row.least, whole), " to ",
                text_of_number(row.most, whole));
}

int64_t product(const char* what, std::initializer_list<int64_t> factors) {
  int64_t value = 1;
  std::string text;
  bool fits = true;
  for (const int64_t factor : factors) {
    fits = fits && !__builtin_mul_overflow(value, factor, &value);
    text += (text.empty() ? "" : " x ") + std::to_string(factor);
  }
  CHORALE_CHECK(fits, "[train] ", what, ": ", text, " is more than there are numbers for; choose smaller ones");
  return value;
}

void OptionTable::check(const Option& row, const std::string& what) {
  const auto in_range = [&](double value, const auto& shown) {
    CHORALE_CHECK(value >= row.least && value <= row.most, what, " expects ", range_of(row), ", not ", shown);
  };
  if (const auto* whole = std::get_if<int64_t*>(&row.target)) in_range(static_cast<double>(**whole), **whole);
  if (const auto* real = std::get_if<double*>(&row.target)) in_range(**real, **real);
  if (const auto* word = std::get_if<std::string*>(&row.target); word && !row.choices.empty()) {
    CHORALE_CHECK(std::find(row.choices.begin(), row.choices.end(), **word) != row.choices.end(), what,
                  " expects one of ", joined(row.choices, ", "), ", not '", printable(**word), "'",
                  did_you_mean(**word, row.choices));
  }
}

void OptionTable::set_number(const Option& row, const std::string& what, const std::string& word) {
  const auto put = [&](auto* target, const auto& value) {
    CHORALE_CHECK(value, what, " expects ", range_of(row), ", not '", printable(word), "'");
    *target = *value;
  };
  if (const auto* whole = std::get_if<int64_t*>(&row.target)) put(*whole, number_of<int64_t>(word));
  if (const auto* real = std::get_if<double*>(&row.target)) put(*real, number_of<double>(word));
}

void OptionTable::set(std::string_view name, const std::vector<std::string>& words) const {
  const std::string what = concat("--", name);
  const Option& option = row(name, "the command line");
  const std::string& last = words.back();  // an option that is repeated counts as its last
  if (const auto* flag = std::get_if<bool*>(&option.target)) {
    CHORALE_CHECK(last == "true" || last == "false", what, " is true or false, not '", printable(last), "'");
    **flag = last == "true";
  } else if (const auto* word = std::get_if<std::string*>(&option.target)) {
    const std::string& wanted = option.value_name;
    CHORALE_CHECK(!last.empty() || wanted.empty(), what, " expects ",
                  wanted == "DIR"    ? "a folder"
                  : wanted == "FILE" ? "a file"
                                     : wanted,
                  ", not ''; leave it out for the default");
    **word = last;
  } else if (const auto* list = std::get_if<std::vector<std::string>*>(&option.target)) {
    **list = words;
  } else {
    set_number(option, what, last);
  }
  check(option, what);
  if (option.kind == OptionKind::kHere) return;
  for (const std::string& word : words) {
    CHORALE_CHECK(is_utf8(word), what, " is written down and must be UTF-8, which '", printable(word), "' is not");
  }
}

void OptionTable::read(const std::string& what, const json::Object& object) const {
  for (const auto& [key, value] : object) {
    const Option& option = row(key, what);
    const std::string where = concat(what, ": ", key);
    const auto wrong = [&, &found = value](const char* expected) {
      throw InvalidArgument(concat(where, " should be ", expected, ", but is ", found.kind()));
    };
    std::visit([&, &found = value](auto* target) { read_value(target, found, wrong); }, option.target);
    check(option, where);
  }
}

json::Object OptionTable::values() const {
  json::Object object;
  for (const Option& row : rows_) {
    if (row.kind != OptionKind::kHere) object.emplace_back(row.name, value_of(row));
  }
  return object;
}

std::string OptionTable::text_of(const Option& row) {
  if (const auto* word = std::get_if<std::string*>(&row.target)) return **word;
  if (const auto* words = std::get_if<std::vector<std::string>*>(&row.target)) return joined(**words, " ");
  return json::write(value_of(row));
}

void check_unchanged(const OptionTable& table, const json::Object& before, const std::string& folder) {
  std::string changes;
  for (const Option& row : table.rows()) {
    if (row.kind != OptionKind::kFixed) continue;
    const json::Value* old = json::find(before, row.name);
    const std::string now = json::write(value_of(row));
    if (old && json::write(*old) != now)
      changes += concat("\n  --", row.name, " was ", json::write(*old), ", not ", now);
  }
  CHORALE_CHECK(changes.empty(), "[train] the run in ", folder,
                " began with other options, which it must keep:", changes,
                "\nLeave them out to go on with it, or choose another folder with --out to begin anew.");
}

}  // namespace chorale::train
