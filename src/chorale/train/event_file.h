// TensorBoard's event files: numbers and texts by tag and step.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "chorale/io/append_file.h"

namespace chorale::train {

class EventFile {
 public:
  // A new file in the folder. Readers drop what earlier files there have from `first_step` on.
  EventFile(const std::filesystem::path& folder, int64_t first_step);

  void number(int64_t step, std::string_view tag, double value);
  void text(int64_t step, std::string_view tag, std::string_view value);
  void flush();

 private:
  void event(int64_t step, std::string_view field);

  io::AppendFile file_;
};

}  // namespace chorale::train
