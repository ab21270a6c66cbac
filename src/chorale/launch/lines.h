// The output of ranks, in whole lines.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <string_view>

namespace chorale::launch {

// Cuts a stream into lines. One without an end is given when the stream ends, or when it is longer than kMaxLineBytes.
class LineCutter {
 public:
  static constexpr size_t kMaxLineBytes = size_t{64} << 10;

  explicit LineCutter(std::function<void(std::string_view line)> take) : take_(std::move(take)) {}
  void feed(std::string_view bytes);
  void finish();

 private:
  std::function<void(std::string_view)> take_;
  std::string rest_;
};

// The last lines of a stream, to be shown when its rank has failed.
class LastLines {
 public:
  void add(std::string_view line);
  const std::deque<std::string>& lines() const { return lines_; }

 private:
  std::deque<std::string> lines_;
};

}  // namespace chorale::launch
