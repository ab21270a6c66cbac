// Progress of long work, for people: on a terminal one live line, elsewhere a plain line every few seconds.
#pragma once

#include <chrono>
#include <string>

#include "chorale/train/output.h"

namespace chorale::train {

class Progress {
 public:
  enum class Style { kQuiet, kPlain, kLive };
  // kLive on a terminal, else kPlain.
  static Style style_for(const Output& out);

  // `total` steps are to be done. `out` must outlive it. Plain lines come at most every `plain_interval`.
  Progress(Output& out, Style style, int64_t total, std::chrono::milliseconds plain_interval = std::chrono::seconds(5));
  // Leaves the terminal in order.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `done` steps are finished; `text` says what else there is to know ("loss 0.31  12,300 examples/s"). Cheap: draws at
  // most ten times a second.
  void show(int64_t done, const std::string& text);
  // A line of its own, above the live one.
  void say(const std::string& line);

 private:
  std::string render(int64_t done, const std::string& text, int columns) const;
  std::string back_to_start(int columns) const;
  void erase();

  Output& out_;
  Style style_;
  int64_t total_;
  std::chrono::milliseconds plain_interval_;
  std::chrono::steady_clock::time_point start_, last_;
  int64_t first_done_ = -1;  // what was done before the first show(): a run that resumes
  int drawn_cells_ = 0;      // of the live line as it stands
};

// "1:05", "2:03:04".
std::string clock_text(double seconds);
// "1,234,567".
std::string grouped(int64_t number);

}  // namespace chorale::train
