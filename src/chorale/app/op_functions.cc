#include "chorale/app/op_functions.h"

#include <sstream>
#include <string_view>

namespace chorale::app {

extern const std::string_view kOpFunctionsTxt;  // made by CMakeLists.txt

namespace {

bool is_word(char c) { return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'); }

std::string trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\n"), last = text.find_last_not_of(" \t\n");
  return first == std::string_view::npos ? "" : std::string(text.substr(first, last - first + 1));
}

bool is_balanced(std::string_view text) {
  int open = 0;
  for (const char c : text) open += c == '(' ? 1 : c == ')' ? -1 : 0;
  return open <= 0;
}

// "// what" at the end of a line, without the slashes.
std::string take_comment(std::string& line) {
  const size_t at = line.find("//");
  if (at == std::string::npos) return {};
  const std::string comment = trimmed(std::string_view(line).substr(at + 2));
  line = line.substr(0, at);
  return comment;
}

// Reads a declaration that begins in column 0 and ends with a semicolon, or CHORALE_FORMS(name, parameters).
bool read_declaration(const std::string& text, OpFunction& function) {
  constexpr std::string_view kForms = "CHORALE_FORMS(";
  if (text.starts_with(kForms)) {
    const size_t comma = text.find(','), end = text.rfind(')');
    if (comma == std::string::npos || end < comma) return false;
    function.name = trimmed(std::string_view(text).substr(kForms.size(), comma - kForms.size()));
    function.declaration = "Tensor " + function.name + "(" + trimmed(text.substr(comma + 1, end - comma - 1)) +
                           "), also " + function.name + "_ and " + function.name + "_out";
    return true;
  }
  if (!text.ends_with(';') || text.find("Tensor") == std::string::npos || text.starts_with("inline") ||
      text.starts_with("using"))
    return false;
  const size_t open = text.find('(');
  if (open == std::string::npos) return false;
  size_t begin = open;
  while (begin > 0 && is_word(text[begin - 1])) --begin;
  function.name = text.substr(begin, open - begin);
  function.declaration = text.substr(0, text.size() - 1);
  return !function.name.empty() && begin > 0;
}

}  // namespace

std::vector<OpFunction> functions_in(const std::string& header) {
  std::vector<OpFunction> found;
  std::istringstream lines(header);
  std::string comment, text;
  bool comment_ended = false;
  for (std::string line; std::getline(lines, line);) {
    if (text.empty()) {
      if (line.empty()) comment.clear();
      if (line.starts_with("//")) {
        if (comment_ended) comment.clear();
        comment_ended = false;
        const std::string words = trimmed(std::string_view(line).substr(2));
        if (!words.starts_with("----")) comment += (comment.empty() ? "" : " ") + words;
        continue;
      }
      if (line.empty() || line[0] == ' ' || line[0] == '#' || line[0] == '}' || line.find('(') == std::string::npos)
        continue;
    }
    const std::string beside = take_comment(line);
    text += (text.empty() ? "" : " ") + trimmed(line);
    if (!is_balanced(text)) continue;
    OpFunction function;
    if (read_declaration(text, function)) {
      function.comment = beside.empty() ? comment : beside;
      found.push_back(std::move(function));
    }
    comment_ended = true;  // it stands for the declarations that follow without another one
    text.clear();
  }
  return found;
}

const std::vector<OpFunction>& op_functions() {
  static const std::vector<OpFunction> functions = functions_in(std::string(kOpFunctionsTxt));
  return functions;
}

}  // namespace chorale::app
