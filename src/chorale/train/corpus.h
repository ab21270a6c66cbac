// Text to learn from, as tokens.
#pragma once

#include <string>
#include <vector>

#include "chorale/train/option_table.h"
#include "chorale/train/tokenizer.h"

namespace chorale::train {

// What all jobs on text let their users choose.
struct TextOptions {
  std::vector<std::string> files{};
  std::string tokenizer = "auto";  // or bytes, bpe, or a folder
  int64_t vocab = 2048;            // of a bpe that is learnt from the text
  int64_t context = 128;           // tokens that the model sees at once
};
void list_options(TextOptions& options, OptionTable& table);
// Replaces auto by the tokenizer of the model in the folder `init`, if that has one, else by bpe.
// InvalidArgument when there is no such tokenizer.
void choose_tokenizer(TextOptions& options, const std::string& init);

struct Corpus {
  Tokenizer tokenizer;
  std::vector<int32_t> tokens{};    // to train on
  std::vector<int32_t> held_out{};  // to be tested with: the last twentieth of the text
  double bytes_per_token = 1;
  std::string description{};  // "4,290,000 bytes of bible-kjv as bytes"
  std::string fingerprint{};
};
// Reads the files one after the other; without any, the text of Debian's package bible-kjv, one verse per line.
// Specials are tokens that no text gives. InvalidArgument when a file cannot be read, when the package is missing, or
// when the text is too short for two windows of `context`.
Corpus read_corpus(const TextOptions& options, std::vector<std::string> specials = {});

}  // namespace chorale::train
