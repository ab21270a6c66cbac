// What a run left in its folder, or has left so far: config.json, metrics.jsonl, evaluation.json.
//
// metrics.jsonl has one JSON object on a line, told apart by "kind", all with "step" and "seconds" of training so far:
//   start       once for each time that the run was started: "task", "ranks", "processor", … as they come
//   train       every few steps: "loss", "accuracy", "bits_per_byte", "epoch", "lr", "gradient_norm", "step_ms",
//               "exposed_communication_ms", and a speed, "pictures_per_second" or the like
//   evaluation  "test_loss", "test_accuracy", "test_bits_per_byte"
//   sample      "text" that the model wrote
//   event       the job goes on with other ranks: "cause", "ranks" from now on, "repeated" (the step), "cost_ms"
//   time        of one "rank" in one step: "compute_ms", "exposed_ms", "hidden_ms", "memory_mib"
//   calls       of functions on worker "to" by worker "from" so far: "calls", "failed", "in_flight", "sent_bytes",
//               "received_bytes", "p50_us", "p99_us"
//   worker      now, by its "name": "queued", "served", "owned_references", "held_references", "threads"
// All but kind, step, rank, text, cause and the names of workers may be missing or null; other kinds and fields are
// passed over. A line counts once its end is written. One that is not understood is passed over too, and named among
// the problems.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chorale/json/json.h"
#include "chorale/report/evaluation.h"
#include "chorale/report/series.h"

namespace chorale::report {

constexpr std::array<std::string_view, 10> kTrainFields = {
    "step",    "seconds", "epoch", "loss", "accuracy", "bits_per_byte", "lr", "gradient_norm",
    "rate",     // what is called …_per_second
    "waiting",  // the share of a step in which communication was exposed
};
constexpr std::array<std::string_view, 5> kEvaluationFields = {"step", "seconds", "test_loss", "test_accuracy",
                                                               "test_bits_per_byte"};
constexpr std::array<std::string_view, 5> kTimeFields = {"step", "compute_ms", "exposed_ms", "hidden_ms", "memory_mib"};

// The fields of a number that a program writes and this page has no name for.
constexpr std::array<std::string_view, 3> kOwnFields = {"step", "seconds", "value"};

constexpr std::array<std::string_view, 7> kCallFields = {"calls",          "failed", "in_flight", "sent_bytes",
                                                         "received_bytes", "p50_us", "p99_us"};
constexpr std::array<std::string_view, 5> kWorkerFields = {"queued", "served", "owned_references", "held_references",
                                                           "threads"};

struct Sample {
  int64_t step = 0;
  std::string text;
};

// A change of the ranks that a job has.
struct RankChange {
  int64_t step = 0;
  std::string cause;
  double ranks = 0, cost_ms = 0;
  bool repeated = false;
};

struct Run {
  std::string name;
  json::Object config;  // the options; empty when there is no file
  json::Object start;   // what the last start said
  Series train{kTrainFields}, evaluations{kEvaluationFields};
  std::map<int64_t, Series> times;    // by rank
  std::map<std::string, Series> own;  // by the name of the field, "kind: field" for a kind of the program's own
  std::vector<Sample> samples;
  std::vector<RankChange> events;
  // The newest figures, in the order of the fields: of calls by the names of caller and called, of workers by theirs.
  std::map<std::pair<std::string, std::string>, std::vector<double>> calls;
  std::map<std::string, std::vector<double>> workers;
  std::string rate_unit;                 // "pictures/s", "tokens/s"
  std::optional<Evaluation> evaluation;  // of a run that has one
  double updated = 0;                    // when the last line was written, in seconds since 1970; 0: none was
};

// Reads the folder of a run, and later what was added to it since.
// InvalidArgument when the file is larger than what is read of a run's metrics: somebody made it so, or it is damaged.
void check_metrics_size(const std::filesystem::path& file);

class RunReader {
 public:
  // Throws InvalidArgument unless it is a folder. Files may be missing: they come with time.
  explicit RunReader(std::filesystem::path folder);

  // Reads what is new; returns whether anything was. A file that was replaced or shortened is read anew.
  bool refresh();
  const Run& run() const { return run_; }
  // What could not be understood: "metrics.jsonl, line 17: …".
  std::vector<std::string> problems() const;

 private:
  // Which content of a file was read: another one has another stamp.
  struct Stamp {
    uint64_t file = 0, bytes = 0;
    int64_t modified_ns = 0;
    bool operator==(const Stamp&) const = default;
  };
  static Stamp stamp_of(const std::filesystem::path& path);

  bool read_metrics();
  void read_line(std::string_view line);
  void take_line(std::string_view what, const json::Object& line);
  // Numbers that have no place of their own.
  void take_own_numbers(const std::string& prefix, const json::Object& line);
  template <class Take>
  bool read_whole(const char* name, Stamp& seen, std::string& problem, const Take& take);

  std::filesystem::path folder_;
  Run run_;
  Stamp metrics_, config_, evaluation_;
  std::string torn_;  // the beginning of a line whose end is not written yet
  bool too_long_ = false;
  int64_t line_ = 0;
  int64_t bad_lines_ = 0;
  std::vector<std::string> metrics_problems_;
  std::string config_problem_, evaluation_problem_;
};

}  // namespace chorale::report
