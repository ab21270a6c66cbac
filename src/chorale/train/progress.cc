#include "chorale/train/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "chorale/base/error.h"

namespace chorale::train {
namespace {

constexpr auto kRedraw = std::chrono::milliseconds(100);

int columns_of(const Output& out) {
  winsize size{};
  // Asked for each time, so that a resized terminal is no matter.
  return ioctl(fileno(out.file()), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

std::string clock_text(double seconds) {
  const auto whole = int64_t{std::llround(seconds)};
  return whole < 3600 ? fmt::format("{}:{:02}", whole / 60, whole % 60)
                      : fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

std::string grouped(int64_t number) {
  std::string text = fmt::format("{}", number);
  for (size_t at = text.size(); at > 3 + (number < 0 ? 1u : 0u);) text.insert(at -= 3, ",");
  return text;
}

Progress::Style Progress::style_for(const Output& out) {
  return isatty(fileno(out.file())) != 0 ? Style::kLive : Style::kPlain;
}

Progress::Progress(Output& out, Style style, int64_t total, std::chrono::milliseconds plain_interval)
    : out_(out),
      style_(style),
      total_(total),
      plain_interval_(plain_interval),
      start_(std::chrono::steady_clock::now()) {}

Progress::~Progress() {
  try {
    erase();
  } catch (const StateError&) {  // nobody is there to see it
  }
}

// A terminal that has become narrower has broken the line into rows: begin at the first of them.
std::string Progress::back_to_start(int columns) const {
  const int rows_above = drawn_cells_ > 0 ? (drawn_cells_ - 1) / columns : 0;
  return rows_above > 0 ? fmt::format("\033[{}A\r\033[J", rows_above) : "\r\033[K";
}

void Progress::erase() {
  if (drawn_cells_ == 0) return;
  const std::string text = back_to_start(columns_of(out_));
  drawn_cells_ = 0;
  out_.print(text);
}

std::string Progress::render(int64_t done, const std::string& text, int columns) const {
  const double share = total_ > 0 ? static_cast<double>(done) / static_cast<double>(total_) : 1;
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const int64_t since = done - first_done_;
  const std::string left =
      since > 0 ? clock_text(elapsed / static_cast<double>(since) * static_cast<double>(total_ - done)) : "-:--";
  const std::string rest =
      fmt::format(" {:3.0f} %  {}/{}  {}  {} left", share * 100, grouped(done), grouped(total_), text, left);
  if (style_ == Style::kPlain) return rest.substr(1);
  const int room = std::min(30, columns - 1 - static_cast<int>(rest.size()));
  if (room < 6) return rest.substr(1, static_cast<size_t>(std::max(0, columns - 1)));
  // Eighths of a cell: a bar that moves smoothly.
  static constexpr const char* kEighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const int eighths = std::clamp(static_cast<int>(share * (room - 2) * 8), 0, (room - 2) * 8);
  std::string bar;
  for (int i = 0; i < eighths / 8; ++i) bar += "█";
  bar += kEighths[eighths % 8];
  const int cells = eighths / 8 + (eighths % 8 != 0 ? 1 : 0);
  return "▕" + bar + std::string(static_cast<size_t>(room - 2 - cells), ' ') + "▏" + rest;
}

void Progress::show(int64_t done, const std::string& text) {
  if (style_ == Style::kQuiet) return;
  const auto now = std::chrono::steady_clock::now();
  const bool first = first_done_ < 0;
  if (first) first_done_ = std::max<int64_t>(0, done - 1);
  const auto interval = style_ == Style::kLive ? kRedraw : plain_interval_;
  if (!first && done < total_ && now - last_ < interval) return;
  last_ = now;
  if (style_ == Style::kPlain) {
    out_.print(render(done, text, 0) + "\n");
  } else {
    const int columns = columns_of(out_);
    const std::string line = render(done, text, columns);
    const std::string start = back_to_start(columns);
    const auto starts_character = [](char byte) { return (static_cast<uint8_t>(byte) & 0xc0) != 0x80; };
    drawn_cells_ = static_cast<int>(std::count_if(line.begin(), line.end(), starts_character));
    out_.print(start + line);
  }
}

void Progress::say(const std::string& line) {
  if (style_ == Style::kQuiet) return;
  erase();
  out_.print(line + "\n");
}

}  // namespace chorale::train
