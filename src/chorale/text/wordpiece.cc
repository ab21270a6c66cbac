#include "chorale/text/wordpiece.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/io/file.h"
#include "chorale/json/json.h"
#include "chorale/text/unicode.h"

namespace chorale::text {
namespace {

constexpr const char* kWordPieceVocabName = "vocab.txt";
constexpr const char* kConfigName = "tokenizer_config.json";
constexpr std::string_view kGoesOn = "##";
constexpr std::string_view kUnknown = "[UNK]";
constexpr size_t kLongestWord = 100;  // characters; a longer one is unknown

// Blocks of ideographs, each of which is a word.
bool is_ideograph(uint32_t code) {
  constexpr uint32_t kBlocks[][2] = {{0x3400, 0x4dbf},   {0x4e00, 0x9fff},   {0xf900, 0xfaff},  {0x20000, 0x2a6df},
                                     {0x2a700, 0x2b81f}, {0x2b920, 0x2ceaf}, {0x2f800, 0x2fa1f}};
  return std::any_of(std::begin(kBlocks), std::end(kBlocks),
                     [code](const auto& block) { return code >= block[0] && code <= block[1]; });
}

// BERT counts all of ASCII's signs, such as $ and +.
bool separates(uint32_t code) {
  if (code < 0x80) return code > ' ' && code < 0x7f && kind_of(code) == CharKind::kOther;
  return is_punctuation(code);
}

// A setting that may be missing or null.
std::optional<bool> flag(const json::Object& object, const char* name, const std::string& path) {
  const json::Value* value = json::find(object, name);
  if (!value || value->as<std::nullptr_t>()) return {};
  CHORALE_CHECK(value->as<bool>(), "[WordPiece] ", path, ": ", name, " should be true or false, but is ",
                value->kind());
  return *value->as<bool>();
}

WordPieceOptions read_options(const std::filesystem::path& path) {
  WordPieceOptions options;
  if (!std::filesystem::exists(path)) return options;
  const json::Value root = json::parse(path.string(), io::MappedFile::open(path)->text(), {.bytes = 10'000'000});
  const json::Object& object = root.object(path.string());
  options.lower_case = flag(object, "do_lower_case", path.string()).value_or(true);
  options.strip_accents = flag(object, "strip_accents", path.string());
  CHORALE_CHECK(flag(object, "tokenize_chinese_chars", path.string()).value_or(true), "[WordPiece] ", path,
                ": tokenize_chinese_chars must be true, the only value that is known here");
  return options;
}

}  // namespace

WordPiece WordPiece::parse(std::string_view vocab, const WordPieceOptions& options) {
  WordPiece pieces;
  pieces.options_ = options;
  while (!vocab.empty()) {
    const size_t end = std::min(vocab.find('\n'), vocab.size());
    std::string_view token = vocab.substr(0, end);
    vocab.remove_prefix(std::min(end + 1, vocab.size()));
    if (token.ends_with('\r')) token.remove_suffix(1);
    const Id id = pieces.size();
    pieces.tokens_.emplace_back(token);
    pieces.longest_ = std::max(pieces.longest_, token.size());
    // Where a token is there twice, the last one counts, as in BERT's own program.
    if (token.starts_with(kGoesOn) && token.size() > kGoesOn.size()) {
      pieces.later_[std::string(token.substr(kGoesOn.size()))] = id;
    } else {
      pieces.first_[std::string(token)] = id;
    }
  }
  pieces.unknown_ = pieces.special(kUnknown);
  return pieces;
}

WordPiece WordPiece::load(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / kWordPieceVocabName;
  try {
    return parse(io::MappedFile::open(path)->text(), read_options(folder / kConfigName));
  } catch (const InvalidArgument& error) {
    detail::raise<InvalidArgument>(error.what(), " (folder ", folder, ")");
  }
}

void WordPiece::save(const std::filesystem::path& folder) const {
  std::string vocab;
  for (const std::string& token : tokens_) vocab += token + '\n';
  std::error_code ignored;  // the files say it better
  std::filesystem::create_directories(folder, ignored);
  io::write_file(folder / kWordPieceVocabName, vocab);
  const auto text_of = [](bool value) { return value ? "true" : "false"; };
  io::write_file(
      folder / kConfigName,
      concat("{\n  \"tokenizer_class\": \"BertTokenizer\",\n  \"do_lower_case\": ", text_of(options_.lower_case),
             ",\n  \"strip_accents\": ", options_.strip_accents ? text_of(*options_.strip_accents) : "null", "\n}\n"));
}

void WordPiece::append_simplified(std::u32string& text, uint32_t code) const {
  std::u32string bare;
  if (options_.strip_accents.value_or(options_.lower_case)) {
    append_without_accents(bare, code);
  } else {
    bare += static_cast<char32_t>(code);
  }
  for (const char32_t c : bare) {
    if (options_.lower_case) {
      append_lower_case(text, c);
    } else {
      text += c;
    }
  }
}

void WordPiece::add_word(std::u32string_view word, std::vector<Id>& out) const {
  if (word.empty()) return;
  const size_t before = out.size();
  std::string bytes;
  std::vector<size_t> starts;  // of characters
  for (const char32_t c : word) {
    starts.push_back(bytes.size());
    append_utf8(bytes, c);
  }
  starts.push_back(bytes.size());
  bool known = word.size() <= kLongestWord;
  for (size_t at = 0; known && at < word.size();) {
    const Ids& ids = at == 0 ? first_ : later_;
    known = false;
    for (size_t end = word.size(); end > at; --end) {
      const std::string_view piece = std::string_view(bytes).substr(starts[at], starts[end] - starts[at]);
      if (piece.size() > longest_) continue;
      if (const auto found = ids.find(piece); found != ids.end()) {
        out.push_back(found->second);
        at = end;
        known = true;
        break;
      }
    }
  }
  if (known) return;
  out.resize(before);
  out.push_back(unknown_);
}

std::vector<WordPiece::Id> WordPiece::encode(std::string_view text) const {
  std::vector<Id> ids;
  std::u32string word, simple;
  const auto end_word = [&] {
    add_word(word, ids);
    word.clear();
  };
  for (size_t at = 0; at < text.size();) {
    const Char c = char_at(text, at);
    at += c.bytes;
    constexpr uint32_t kReplaced = 0xfffd;  // stands for what was no character
    const bool breaks_line = c.code == '\t' || c.code == '\n' || c.code == '\r';
    if (!c.valid || c.code == kReplaced || (is_invisible(c.code) && !breaks_line)) continue;
    if (kind_of(c.code) == CharKind::kSpace) {
      end_word();
      continue;
    }
    const bool alone = is_ideograph(c.code);
    if (alone) end_word();
    simple.clear();
    append_simplified(simple, c.code);
    for (const char32_t s : simple) {
      if (separates(s)) {
        end_word();
        word += s;
        end_word();
      } else {
        word += s;
      }
    }
    if (alone) end_word();
  }
  end_word();
  return ids;
}

std::string WordPiece::decode(std::span<const Id> ids) const {
  std::string text;
  for (const Id id : ids) {
    CHORALE_CHECK(id >= 0 && id < size(), "[WordPiece] there is no token ", id, " in a vocabulary of ", size());
    std::string_view token = tokens_[static_cast<size_t>(id)];
    if (token.starts_with(kGoesOn) && token.size() > kGoesOn.size()) {
      token.remove_prefix(kGoesOn.size());
    } else if (!text.empty()) {
      text += ' ';
    }
    text += token;
  }
  return text;
}

WordPiece::Id WordPiece::special(std::string_view name) const {
  const auto found = first_.find(name);
  CHORALE_CHECK(found != first_.end(), "[WordPiece] ", kWordPieceVocabName, " has no token ", name);
  return found->second;
}

}  // namespace chorale::text
