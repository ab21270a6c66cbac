// evaluation.json of a run that learns to tell classes of pictures apart: what it takes for what, and its worst
// mistakes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "chorale/json/json.h"

namespace chorale::report {

// A picture that was taken for something else.
struct Mistake {
  int64_t index = 0;  // in the data set
  int64_t label = 0, guess = 0;
  double probability = 0;       // that the model gave to its guess
  std::vector<uint8_t> pixels;  // rows from the top, 0 to 255
};

struct Evaluation {
  std::vector<std::string> names;               // of the classes
  std::vector<std::vector<int64_t>> confusion;  // [label][guess]: how many pictures
  int64_t width = 28, height = 28;              // of a picture
  std::vector<Mistake> worst;                   // the worst first
};

json::Object to_json(const Evaluation& evaluation);
// Throws InvalidArgument, naming `what` and the field, unless all of it fits together.
Evaluation evaluation_from_json(std::string_view what, const json::Value& value);

// The file that a report looks for in the folder of a run.
void write_evaluation(const std::filesystem::path& run, const Evaluation& evaluation);

std::string base64(const std::vector<uint8_t>& bytes);
// Throws InvalidArgument for text that base64() does not write.
std::vector<uint8_t> from_base64(std::string_view text);

}  // namespace chorale::report
