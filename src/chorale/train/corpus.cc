#include "chorale/train/corpus.h"

#include <cstdio>
#include <memory>

#include "chorale/base/error.h"
#include "chorale/io/checksum.h"
#include "chorale/io/file.h"
#include "chorale/train/progress.h"

namespace chorale::train {
namespace {

// `bible` prints a verse per line, with its place in front: "Ge1:1 In the beginning …".
std::string bible() {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(::popen("bible -f gen1:1-rev22:21 2>/dev/null", "re"),
                                                             ::pclose);
  std::string text;
  char* line = nullptr;
  size_t capacity = 0;
  while (pipe && ::getline(&line, &capacity, pipe.get()) > 0) {
    const std::string_view verse(line);
    const size_t space = verse.find(' ');
    if (space != std::string_view::npos) text += verse.substr(space + 1);
  }
  std::free(line);
  CHORALE_CHECK(!text.empty(),
                "[train] without --text the text of Debian's package bible-kjv is learnt, which is not "
                "installed: sudo apt-get install bible-kjv, or name a file with --text");
  return text;
}

std::string read_text(const TextOptions& options) {
  if (options.files.empty()) return bible();
  std::string text;
  for (const std::string& file : options.files) text += io::MappedFile::open(file)->text();
  return text;
}

Tokenizer make_tokenizer(const TextOptions& options, const std::string& text, std::vector<std::string> specials) {
  const std::string& name = options.tokenizer;
  if (name == "bytes") return Tokenizer::bytes(std::move(specials));
  if (name == "bpe" || name == "auto") {
    return Tokenizer::bpe(
        text::Bpe::train(text, {.vocab_size = static_cast<int32_t>(options.vocab), .specials = std::move(specials)}));
  }
  return Tokenizer::load(name);
}

}  // namespace

void list_options(TextOptions& options, OptionTable& table) {
  table.add({.name = "text",
             .help = "files to learn from; default: the text of Debian's package bible-kjv",
             .target = &options.files,
             .value_name = "FILE"});
  table.add({.name = "tokenizer",
             .help = "bytes, bpe (learnt from the text), a folder with GPT-2's vocab.json and merges.txt or BERT's "
                     "vocab.txt; auto: that of --init if it has one, else bpe",
             .target = &options.tokenizer});
  table.add({.name = "vocab", .help = "most tokens of a bpe", .target = &options.vocab, .least = 300, .most = 1 << 24});
  table.add({.name = "context",
             .help = "tokens that the model sees at once",
             .target = &options.context,
             .least = 2,
             .most = 1 << 24});
}

void choose_tokenizer(TextOptions& options, const std::string& init) {
  std::string& name = options.tokenizer;
  if (name == "auto") name = !init.empty() && Tokenizer::is_in(init) ? init : "bpe";
  CHORALE_CHECK(name == "bytes" || name == "bpe" || Tokenizer::is_in(name), "[train] --tokenizer expects auto, bytes, ",
                "bpe or a folder with a tokenizer (vocab.json and merges.txt, or vocab.txt), which ", name, " is not");
}

Corpus read_corpus(const TextOptions& options, std::vector<std::string> specials) {
  const std::string text = read_text(options);
  Corpus corpus{.tokenizer = make_tokenizer(options, text, std::move(specials))};
  corpus.tokens = corpus.tokenizer.encode(text);
  const auto context = static_cast<size_t>(options.context);
  CHORALE_CHECK(corpus.tokens.size() > 2 * context + 2, "[train] the text has ", corpus.tokens.size(),
                " tokens only, too few for windows of ", context, "; choose a longer one, or a smaller --context");
  corpus.bytes_per_token = static_cast<double>(text.size()) / static_cast<double>(corpus.tokens.size());
  const size_t tested = std::max(corpus.tokens.size() / 20, context + 1);
  corpus.held_out.assign(corpus.tokens.end() - static_cast<std::ptrdiff_t>(tested), corpus.tokens.end());
  corpus.tokens.resize(corpus.tokens.size() - tested);
  corpus.description = concat(grouped(static_cast<int64_t>(text.size())), " bytes of ",
                              options.files.empty()       ? "bible-kjv"
                              : options.files.size() == 1 ? options.files[0]
                                                          : "text",
                              " as ", grouped(static_cast<int64_t>(corpus.tokens.size() + tested)), " tokens (",
                              corpus.tokenizer.describe(), ")");
  corpus.fingerprint = concat("text of SHA-256 ", io::sha256(text), ", ", corpus.tokenizer.describe());
  return corpus;
}

}  // namespace chorale::train
