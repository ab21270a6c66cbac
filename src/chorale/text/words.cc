#include "chorale/text/words.h"

#include "chorale/text/unicode.h"

namespace chorale::text {
namespace {

CharKind kind_at(std::string_view text, size_t at, size_t& end) {
  const Char c = char_at(text, at);
  end = at + c.bytes;
  return c.valid ? kind_of(c.code) : CharKind::kOther;
}

}  // namespace

size_t end_of_piece(std::string_view text, size_t at) {
  const std::string_view rest = text.substr(at);
  for (const std::string_view ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
    if (rest.starts_with(ending)) return at + ending.size();
  }
  // The run that decides: behind one space, if there is something behind it.
  size_t end = 0;
  const size_t begin = text[at] == ' ' && at + 1 < text.size() ? at + 1 : at;
  CharKind kind = kind_at(text, begin, end);
  if (kind == CharKind::kSpace) kind = kind_at(text, at, end);  // two spaces: a run of them, from the first one
  size_t last = at;                                             // where the last character of the run begins
  while (end < text.size()) {
    size_t next = 0;
    if (kind_at(text, end, next) != kind) break;
    last = end;
    end = next;
  }
  if (kind != CharKind::kSpace || end == text.size() || last == at) return end;
  return last;  // the last space belongs to what follows, if it takes it
}

}  // namespace chorale::text
