// JSON values as text.
#pragma once

#include <string>

#include "chorale/json/json.h"

namespace chorale::json {

enum class Layout : uint8_t {
  kLine,   // no line breaks: a line of a log
  kPages,  // a member of the outermost two levels on a line of its own: a file that people read
};
// Numbers are as short as they can be to read back as the same; JSON has no word for NaN and infinity, which become
// null. Throws InvalidArgument for text that is not UTF-8.
std::string write(const Value& value, Layout layout = Layout::kLine);
std::string write(const Object& object, Layout layout = Layout::kLine);

}  // namespace chorale::json
