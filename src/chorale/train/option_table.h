// The options of a training job, by name: one row serves the command line, files of options, the file that a run
// leaves behind, and the comparison with it when the run goes on.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "chorale/json/json.h"

namespace chorale::train {

enum class OptionKind : uint8_t {
  kFixed,  // part of what is trained: a run that goes on keeps it
  kFree,   // may change when a run goes on
  kHere,   // about this start and this machine: never written down
};

struct Option {
  using Target = std::variant<bool*, int64_t*, double*, std::string*, std::vector<std::string>*>;

  std::string name;  // as on the command line, without the dashes
  std::string help;
  Target target;
  OptionKind kind = OptionKind::kFixed;
  // Values that are allowed: numbers from `least` to `most`, words among `choices` unless that is empty. Every number
  // has a range: a test looks for rows without one.
  double least = 0;
  double most = std::numeric_limits<double>::infinity();
  std::vector<std::string> choices{};
  std::string value_name{};  // for the help, such as FILE
  std::string also{};        // further names on the command line, with their dashes
  std::string variable{};    // of the environment, that gives it where the command line does not
};

class OptionTable {
 public:
  // The target must outlive the table.
  void add(Option row);
  const std::vector<Option>& rows() const { return rows_; }

  // Sets an option from the words of a command line; InvalidArgument says what was expected.
  void set(std::string_view name, const std::vector<std::string>& words) const;
  // Sets every option that a JSON object has; a key that is no option is an InvalidArgument with the nearest name.
  void read(const std::string& what, const json::Object& object) const;
  // The values of all options that are written down.
  json::Object values() const;
  // A value as text, as the help shows it.
  static std::string text_of(const Option& row);

 private:
  const Option& row(std::string_view name, const std::string& what) const;
  static void check(const Option& row, const std::string& what);
  static void set_number(const Option& row, const std::string& what, const std::string& word);

  std::vector<Option> rows_;
};

// "a whole number from 1 to 64": what a row of numbers expects.
std::string range_of(const Option& row);

// The product of options, which may each be large: InvalidArgument says `what` when there is no such number.
int64_t product(const char* what, std::initializer_list<int64_t> factors);

// InvalidArgument names the fixed options that differ from those of the run in `folder`, which began with `before`.
void check_unchanged(const OptionTable& table, const json::Object& before, const std::string& folder);

}  // namespace chorale::train
