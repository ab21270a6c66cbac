#include "chorale/report/evaluation.h"

#include <algorithm>
#include <array>

#include "chorale/base/error.h"
#include "chorale/io/file.h"
#include "chorale/json/json_write.h"

namespace chorale::report {
namespace {

constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
// What a page can show, and a file that nobody vouches for may ask for.
constexpr size_t kMostClasses = 1000, kMostMistakes = 100;
constexpr int64_t kLargestSide = 512;

const json::Value& member(std::string_view what, const json::Object& object, std::string_view key) {
  const json::Value* value = json::find(object, key);
  CHORALE_CHECK(value, "[report] ", what, " has no \"", key, "\"");
  return *value;
}

int64_t number_below(std::string_view what, const json::Object& object, std::string_view key, int64_t limit) {
  const int64_t number = member(what, object, key).size(concat(what, ": ", key));
  CHORALE_CHECK(number < limit, "[report] ", what, ": ", key, " is ", number, ", expected less than ", limit);
  return number;
}

double probability_of(std::string_view what, const json::Value& value) {
  double probability = -1;
  if (const auto* real = value.as<double>()) probability = *real;
  if (const auto* whole = value.as<int64_t>()) probability = static_cast<double>(*whole);
  CHORALE_CHECK(probability >= 0 && probability <= 1, "[report] ", what, ": probability must be a number from 0 to 1");
  return probability;
}

Mistake mistake_from_json(std::string_view what, const json::Value& value, const Evaluation& evaluation) {
  const json::Object& object = value.object(what);
  const auto classes = static_cast<int64_t>(evaluation.names.size());
  Mistake mistake;
  mistake.index = member(what, object, "index").size(concat(what, ": index"));
  mistake.label = number_below(what, object, "label", classes);
  mistake.guess = number_below(what, object, "guess", classes);
  mistake.probability = probability_of(what, member(what, object, "probability"));
  mistake.pixels = from_base64(member(what, object, "pixels").string(concat(what, ": pixels")));
  const int64_t expected = evaluation.width * evaluation.height;
  CHORALE_CHECK(std::cmp_equal(mistake.pixels.size(), expected), "[report] ", what, ": ", mistake.pixels.size(),
                " pixels, expected ", evaluation.width, " x ", evaluation.height);
  return mistake;
}

}  // namespace

std::string base64(const std::vector<uint8_t>& bytes) {
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t word = 0;
    const size_t count = std::min<size_t>(3, bytes.size() - i);
    for (size_t k = 0; k < 3; ++k) word = word << 8 | (k < count ? bytes[i + k] : 0U);
    for (size_t k = 0; k < 4; ++k) text += k <= count ? kDigits[word >> (18 - 6 * k) & 63] : '=';
  }
  return text;
}

std::vector<uint8_t> from_base64(std::string_view text) {
  CHORALE_CHECK(text.size() % 4 == 0, "[report] base64 of ", text.size(), " characters, expected a multiple of 4");
  std::vector<uint8_t> bytes;
  bytes.reserve(text.size() / 4 * 3);
  for (size_t i = 0; i < text.size(); i += 4) {
    const bool last = i + 4 == text.size();
    const size_t padding = !last ? 0 : text[i + 3] != '=' ? 0 : text[i + 2] != '=' ? 1 : 2;
    uint32_t word = 0;
    for (size_t k = 0; k < 4; ++k) {
      const size_t digit = k + padding >= 4 ? 0 : kDigits.find(text[i + k]);
      CHORALE_CHECK(digit != std::string_view::npos, "[report] not base64 at character ", i + k);
      word = word << 6 | static_cast<uint32_t>(digit);
    }
    for (size_t k = 0; k < 3 - padding; ++k) bytes.push_back(static_cast<uint8_t>(word >> (16 - 8 * k) & 255));
  }
  return bytes;
}

json::Object to_json(const Evaluation& evaluation) {
  json::Array names, confusion, worst;
  for (const std::string& name : evaluation.names) names.emplace_back(name);
  for (const std::vector<int64_t>& row : evaluation.confusion) {
    json::Array counts;
    for (int64_t count : row) counts.emplace_back(count);
    confusion.emplace_back(std::move(counts));
  }
  for (const Mistake& mistake : evaluation.worst) {
    worst.emplace_back(json::Object{{"index", json::Value(mistake.index)},
                                    {"label", json::Value(mistake.label)},
                                    {"guess", json::Value(mistake.guess)},
                                    {"probability", json::Value(mistake.probability)},
                                    {"pixels", json::Value(base64(mistake.pixels))}});
  }
  return {{"names", json::Value(std::move(names))},
          {"confusion", json::Value(std::move(confusion))},
          {"width", json::Value(evaluation.width)},
          {"height", json::Value(evaluation.height)},
          {"worst", json::Value(std::move(worst))}};
}

Evaluation evaluation_from_json(std::string_view what, const json::Value& value) {
  const json::Object& object = value.object(what);
  Evaluation evaluation;
  for (const json::Value& name : member(what, object, "names").array(concat(what, ": names")))
    evaluation.names.push_back(name.string(concat(what, ": a name")));
  const size_t classes = evaluation.names.size();
  CHORALE_CHECK(classes > 0 && classes <= kMostClasses, "[report] ", what, " has ", classes,
                " names of classes, expected 1 to ", kMostClasses);
  const json::Array& rows = member(what, object, "confusion").array(concat(what, ": confusion"));
  CHORALE_CHECK(rows.size() == classes, "[report] ", what, ": confusion has ", rows.size(), " rows for ", classes,
                " classes");
  for (const json::Value& row : rows) {
    std::vector<int64_t>& counts = evaluation.confusion.emplace_back();
    for (const json::Value& count : row.array(concat(what, ": a row of confusion")))
      counts.push_back(count.size(concat(what, ": a count of confusion")));
    CHORALE_CHECK(counts.size() == classes, "[report] ", what, ": a row of confusion has ", counts.size(),
                  " counts for ", classes, " classes");
  }
  evaluation.width = number_below(what, object, "width", kLargestSide + 1);
  evaluation.height = number_below(what, object, "height", kLargestSide + 1);
  const json::Array& worst = member(what, object, "worst").array(concat(what, ": worst"));
  CHORALE_CHECK(worst.size() <= kMostMistakes, "[report] ", what, " has ", worst.size(),
                " pictures in worst, expected at most ", kMostMistakes);
  for (const json::Value& mistake : worst)
    evaluation.worst.push_back(
        mistake_from_json(concat(what, ": worst[", evaluation.worst.size(), "]"), mistake, evaluation));
  return evaluation;
}

void write_evaluation(const std::filesystem::path& run, const Evaluation& evaluation) {
  io::AtomicFile file(run / "evaluation.json");
  file.write(json::write(to_json(evaluation), json::Layout::kPages) + "\n");
  file.commit();
}

}  // namespace chorale::report
