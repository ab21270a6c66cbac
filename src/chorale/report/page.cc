#include "chorale/report/page.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "chorale/base/error.h"
#include "chorale/io/file.h"
#include "chorale/json/json_write.h"
#include "chorale/report/page_parts.h"

namespace chorale::report {
namespace {

// More than the pixels of a plot, few enough for a page of some hundred kilobytes.
constexpr size_t kMostPoints = 1500;
constexpr size_t kMostSamples = 20, kLongestSample = 8000;

json::Value series_json(const Series& series) {
  json::Object object;
  for (const Column& column : series.columns()) {
    json::Array values;
    for (double value : column.values) values.emplace_back(value);
    object.emplace_back(std::string(column.name), json::Value(std::move(values)));
  }
  return json::Value(std::move(object));
}

json::Value thinned_json(const Series& series) {
  return series_json(series.thinned(kMostPoints, "loss", "loss_low", "loss_high"));
}

// The text is cut to its longest length, never within a character.
std::string shortened(const std::string& text) {
  if (text.size() <= kLongestSample) return text;
  size_t end = kLongestSample;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
  return text.substr(0, end) + " …";
}

// Evenly chosen ones, the last always among them.
json::Value samples_json(const std::vector<Sample>& samples) {
  const size_t shown = std::min(kMostSamples, samples.size());
  json::Array array;
  for (size_t i = 1; i <= shown; ++i) {
    const Sample& sample = samples[i * samples.size() / shown - 1];
    array.emplace_back(json::Object{{"step", json::Value(sample.step)}, {"text", json::Value(shortened(sample.text))}});
  }
  return json::Value(std::move(array));
}

json::Value events_json(const std::vector<RankChange>& events) {
  json::Array array;
  for (const RankChange& event : events)
    array.emplace_back(json::Object{{"step", json::Value(event.step)},
                                    {"cause", json::Value(shortened(event.cause))},
                                    {"ranks", json::Value(event.ranks)},
                                    {"cost_ms", json::Value(event.cost_ms)},
                                    {"repeated", json::Value(event.repeated)}});
  return json::Value(std::move(array));
}

json::Object figures_json(std::span<const std::string_view> fields, const std::vector<double>& figures) {
  json::Object object;
  for (size_t i = 0; i < fields.size(); ++i) object.emplace_back(std::string(fields[i]), json::Value(figures[i]));
  return object;
}

json::Value calls_json(const Run& run) {
  json::Array array;
  for (const auto& [pair, figures] : run.calls) {
    json::Object object = figures_json(kCallFields, figures);
    object.emplace_back("from", json::Value(pair.first));
    object.emplace_back("to", json::Value(pair.second));
    array.emplace_back(std::move(object));
  }
  return json::Value(std::move(array));
}

json::Value workers_json(const Run& run) {
  json::Array array;
  for (const auto& [name, figures] : run.workers) {
    json::Object object = figures_json(kWorkerFields, figures);
    object.emplace_back("name", json::Value(name));
    array.emplace_back(std::move(object));
  }
  return json::Value(std::move(array));
}

json::Value run_json(const RunReader& reader) {
  const Run& run = reader.run();
  json::Array times, problems;
  for (const auto& [rank, series] : run.times) {
    json::Object object = {{"rank", json::Value(rank)}};
    object.emplace_back("series", thinned_json(series));
    times.emplace_back(std::move(object));
  }
  json::Object own;
  for (const auto& [name, series] : run.own) own.emplace_back(name, thinned_json(series));
  for (const std::string& problem : reader.problems()) problems.emplace_back(problem);
  return json::Value(json::Object{
      {"name", json::Value(run.name)},
      {"config", json::Value(run.config)},
      {"start", json::Value(run.start)},
      {"updated", json::Value(run.updated)},
      {"rate_unit", json::Value(run.rate_unit)},
      {"train", thinned_json(run.train)},
      {"evaluations", thinned_json(run.evaluations)},
      {"times", json::Value(std::move(times))},
      {"own", json::Value(std::move(own))},
      {"samples", samples_json(run.samples)},
      {"events", events_json(run.events)},
      {"calls", calls_json(run)},
      {"workers", workers_json(run)},
      {"evaluation", run.evaluation ? json::Value(to_json(*run.evaluation)) : json::Value()},
      {"problems", json::Value(std::move(problems))},
  });
}

// Text of a run could end the element that the data is in.
std::string without_tags(std::string_view json) {
  std::string text;
  text.reserve(json.size());
  for (char c : json) {
    if (c == '<') {
      text += "\\u003c";
    } else {
      text += c;
    }
  }
  return text;
}

}  // namespace

std::string page_data(std::span<const RunReader* const> runs) {
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  json::Array array;
  for (const RunReader* run : runs) array.push_back(run_json(*run));
  return json::write(json::Object{{"made", json::Value(now)}, {"runs", json::Value(std::move(array))}});
}

std::string page(std::string_view data, Mode mode) {
  // What the template's marks stand for.
  const std::pair<std::string_view, std::string> parts[] = {
      {"%STYLE%", std::string(kPageCss)},
      {"%MODE%", mode == Mode::kLive ? "live" : "file"},
      {"%DATA%", without_tags(data)},
      {"%SCRIPT%", concat(kPlotJs, kPageJs)},
  };
  std::string text;
  std::string_view rest = kPageHtml;
  for (const auto& [mark, part] : parts) {
    const size_t at = rest.find(mark);
    CHORALE_INVARIANT(at != std::string_view::npos, "the page has no ", mark, " or has it in another order");
    text.append(rest.substr(0, at)).append(part);
    rest.remove_prefix(at + mark.size());
  }
  return text.append(rest);
}

std::vector<std::string> write_report(std::span<const std::filesystem::path> runs, const std::filesystem::path& file) {
  std::vector<std::unique_ptr<RunReader>> readers;
  std::vector<const RunReader*> views;
  std::vector<std::string> problems;
  for (const std::filesystem::path& folder : runs) {
    check_metrics_size(folder / "metrics.jsonl");
    RunReader& reader = *readers.emplace_back(std::make_unique<RunReader>(folder));
    reader.refresh();
    CHORALE_CHECK(reader.run().updated > 0, "[report] ", folder,
                  " has no metrics.jsonl that is a regular file; name the folder of a run, such as runs/NAME");
    views.push_back(&reader);
    for (const std::string& problem : reader.problems()) problems.push_back(reader.run().name + ": " + problem);
  }
  io::AtomicFile output(file);
  output.write(page(page_data(views), Mode::kFile));
  output.commit();
  return problems;
}

}  // namespace chorale::report
