#include <algorithm>
#include <array>

#include "chorale/base/error.h"
#include "chorale/io/file.h"
#include "chorale/json/json.h"
#include "chorale/text/bpe.h"
#include "chorale/text/unicode.h"

// vocab.json: {"!": 0, "\"": 1, …, "Ġthe": 262, …}, ids without gaps. merges.txt: a first line "#version: 0.2", then
// the two parts of each merge, "Ġ t", a line each, in the order in which they were found. All in printable characters.

namespace chorale::text {
namespace {

constexpr const char* kBpeVocabName = "vocab.json";
constexpr const char* kMergesName = "merges.txt";

constexpr auto kPrintable = [] {
  std::array<uint32_t, 256> codes{};
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool shown = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    codes[byte] = shown ? byte : next++;
  }
  return codes;
}();

// The ids of a vocabulary by key, checked to be 0 … n - 1.
std::unordered_map<std::string, Bpe::Id> read_vocab(std::string_view text) {
  const json::Value root = json::parse(kBpeVocabName, text, {.depth = 1});
  const json::Object& members = root.object(kBpeVocabName);
  std::unordered_map<std::string, Bpe::Id> ids;
  std::vector<bool> seen(members.size());
  for (const auto& [key, value] : members) {
    const int64_t id = value.size(key);
    CHORALE_CHECK(id < static_cast<int64_t>(members.size()), "[Bpe] ", kBpeVocabName, ": ", json::quote(key),
                  " has id ", id, ", but ids go from 0 to ", members.size() - 1);
    CHORALE_CHECK(!seen[static_cast<size_t>(id)], "[Bpe] ", kBpeVocabName, " has the id ", id, " twice");
    seen[static_cast<size_t>(id)] = true;
    ids.emplace(key, static_cast<Bpe::Id>(id));
  }
  return ids;
}

}  // namespace

uint32_t printable_of_byte(uint8_t byte) { return kPrintable[byte]; }

std::string printable(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) append_utf8(text, printable_of_byte(static_cast<uint8_t>(c)));
  return text;
}

Bpe Bpe::parse(std::string_view vocab, std::string_view merges) {
  const std::unordered_map<std::string, Id> ids = read_vocab(vocab);
  Bpe bpe;
  bpe.tokens_.resize(ids.size());
  std::vector<bool> of_text(ids.size());  // made of bytes; the rest are specials
  for (uint32_t i = 0; i < 256; ++i) {
    const std::string byte(1, static_cast<char>(i));
    const auto found = ids.find(printable(byte));
    CHORALE_CHECK(found != ids.end(), "[Bpe] ", kBpeVocabName, " has no token for the byte ", i,
                  ": texts with it could not be encoded");
    bpe.byte_ids_[i] = found->second;
    bpe.tokens_[static_cast<size_t>(found->second)] = byte;
    of_text[static_cast<size_t>(found->second)] = true;
  }

  int64_t number = 0;
  while (!merges.empty()) {
    const size_t end = std::min(merges.find('\n'), merges.size());
    std::string_view line = merges.substr(0, end);
    merges.remove_prefix(std::min(end + 1, merges.size()));
    ++number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || (number == 1 && line.starts_with("#version"))) continue;
    const size_t space = line.find(' ');
    CHORALE_CHECK(space != std::string_view::npos && line.find(' ', space + 1) == std::string_view::npos, "[Bpe] ",
                  kMergesName, ", line ", number, ": expected two tokens with a space between them");
    const std::string left(line.substr(0, space)), right(line.substr(space + 1));
    const auto id_of = [&](const std::string& token) {
      const auto found = ids.find(token);
      CHORALE_CHECK(found != ids.end(), "[Bpe] ", kMergesName, ", line ", number, ": a token of ", token.size(),
                    " bytes is not in ", kBpeVocabName);
      return found->second;
    };
    const Id left_id = id_of(left), right_id = id_of(right), joined = id_of(left + right);
    for (const Id id : {left_id, right_id}) {
      CHORALE_CHECK(of_text[static_cast<size_t>(id)], "[Bpe] ", kMergesName, ", line ", number,
                    ": joins a token that no line before it made");
    }
    const auto rank = static_cast<int32_t>(bpe.merges_.size());
    CHORALE_CHECK(bpe.merges_.emplace(pair_of(left_id, right_id), Merge{rank, joined}).second, "[Bpe] ", kMergesName,
                  ", line ", number, ": joins a pair that was joined before");
    bpe.tokens_[static_cast<size_t>(joined)] =
        bpe.tokens_[static_cast<size_t>(left_id)] + bpe.tokens_[static_cast<size_t>(right_id)];
    of_text[static_cast<size_t>(joined)] = true;
  }

  for (const auto& [key, id] : ids) {
    if (of_text[static_cast<size_t>(id)]) continue;
    bpe.tokens_[static_cast<size_t>(id)] = key;
    bpe.specials_.emplace(key, id);
  }
  return bpe;
}

Bpe Bpe::load(const std::filesystem::path& vocab, const std::filesystem::path& merges) {
  const auto vocab_file = io::MappedFile::open(vocab), merges_file = io::MappedFile::open(merges);
  try {
    return parse(vocab_file->text(), merges_file->text());
  } catch (const InvalidArgument& error) {
    detail::raise<InvalidArgument>(error.what(), " (files ", vocab, " and ", merges, ")");
  }
}

Bpe Bpe::load(const std::filesystem::path& folder) { return load(folder / kBpeVocabName, folder / kMergesName); }

void Bpe::save(const std::filesystem::path& folder) const {
  std::string vocab = "{";
  for (Id id = 0; id < size(); ++id) {
    const std::string& bytes = tokens_[static_cast<size_t>(id)];
    const auto special = specials_.find(bytes);
    const bool is_special = special != specials_.end() && special->second == id;
    vocab += (id ? "," : "") + json::quote(is_special ? bytes : printable(bytes)) + ':' + std::to_string(id);
  }
  vocab += "}\n";

  std::vector<std::pair<int32_t, Pair>> in_order;
  for (const auto& [pair, merge] : merges_) in_order.emplace_back(merge.rank, pair);
  std::sort(in_order.begin(), in_order.end());
  std::string merges = "#version: 0.2\n";
  for (const auto& [rank, pair] : in_order) {
    merges +=
        printable(token(static_cast<Id>(pair >> 32))) + ' ' + printable(token(static_cast<Id>(pair & 0xffffffff)));
    merges += '\n';
  }
  std::error_code ignored;  // the files say it better
  std::filesystem::create_directories(folder, ignored);
  io::AtomicFile merges_file(folder / kMergesName), vocab_file(folder / kBpeVocabName);
  merges_file.write(merges);
  vocab_file.write(vocab);
  merges_file.commit();
  vocab_file.commit();
}

}  // namespace chorale::text
