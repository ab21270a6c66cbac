// What a run writes down of itself while it goes: metrics.jsonl, a JSON object per line, and TensorBoard's events.
#pragma once

#include <chrono>
#include <filesystem>

#include "chorale/json/json.h"
#include "chorale/train/event_file.h"
#include "chorale/train/task.h"

namespace chorale::train {

class RunLog {
 public:
  // Goes on behind `step`: lines of later steps, which will be made again, are dropped, and so are damaged ones, with a
  // warning. `start` is the first line of this session, besides step, kind and time.
  RunLog(const std::filesystem::path& folder, int64_t step, json::Object start);

  // `kind` is "train" or "evaluation"; numbers appear in TensorBoard as KIND/NAME.
  void numbers(const char* kind, int64_t step, const Metrics& metrics);
  // Where a rank's time went in a step, and its memory.
  void rank(int64_t step, int rank, const Metrics& metrics);
  void sample(int64_t step, const std::string& text);
  // A change of the job's ranks.
  void event(int64_t step, json::Object members) { line("event", step, std::move(members)); }
  // Whole lines that somebody else has made (rpc/figures.h).
  void add_lines(const std::string& lines);
  // Seconds of this run, with those before it was resumed; the time in between does not count.
  double seconds() const;

 private:
  void line(const char* kind, int64_t step, json::Object members);

  double seconds_before_ = 0;  // reads the file, before it is opened to grow
  io::AppendFile file_;
  std::chrono::steady_clock::time_point start_;
  EventFile events_;
};

}  // namespace chorale::train
