#include "chorale/launch/lines.h"

#include <algorithm>

namespace chorale::launch {

void LineCutter::feed(std::string_view bytes) {
  while (!bytes.empty()) {
    const size_t end = bytes.find('\n');
    const size_t taken = std::min(end == std::string_view::npos ? bytes.size() : end, kMaxLineBytes - rest_.size());
    rest_ += bytes.substr(0, taken);
    bytes.remove_prefix(taken);
    if (!bytes.empty() && bytes.front() == '\n') {
      bytes.remove_prefix(1);
    } else if (rest_.size() < kMaxLineBytes) {
      return;
    }
    take_(rest_);
    rest_.clear();
  }
}

void LineCutter::finish() {
  if (!rest_.empty()) take_(rest_);
  rest_.clear();
}

void LastLines::add(std::string_view line) {
  constexpr size_t kLines = 8, kBytes = 500;
  if (line.find_first_not_of(" \t\r") == std::string_view::npos) return;
  lines_.emplace_back(line.substr(0, kBytes));
  if (lines_.size() > kLines) lines_.pop_front();
}

}  // namespace chorale::launch
