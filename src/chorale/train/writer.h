// A GPT writes: text from a prompt, as long as one likes.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "chorale/models/gpt2.h"
#include "chorale/train/tokenizer.h"

namespace chorale::train {

struct WriteOptions {
  int64_t tokens = 200;
  double temperature = 1;  // 0: always the likeliest
  int64_t top_k = 0;       // 0: all
  double top_p = 1;
  Generator* generator = nullptr;  // by default the process's
  // Gets the text piece by piece, as soon as it is there.
  std::function<void(const std::string& piece)> on_text{};
};

// The prompt and what follows, in UTF-8. An empty prompt counts as a line break. The model, in evaluation mode, sees as
// many of the last tokens as it can: when its context is full it goes on from the second half.
std::string write_text(models::Gpt2& model, const Tokenizer& tokenizer, std::string_view prompt,
                       const WriteOptions& options);

}  // namespace chorale::train
