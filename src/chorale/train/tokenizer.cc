#include "chorale/train/tokenizer.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/text/bytes.h"
#include "chorale/text/unicode.h"

namespace chorale::train {
namespace {

constexpr const char *kBpeFile = "vocab.json", *kWordPieceFile = "vocab.txt";

}  // namespace

int32_t Tokenizer::BytesAndSpecials::size() const {
  return text::Bytes::size() + static_cast<int32_t>(specials.size());
}
std::vector<int32_t> Tokenizer::BytesAndSpecials::encode(std::string_view text) const {
  return text::Bytes::encode(text);
}
std::string Tokenizer::BytesAndSpecials::decode(std::span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) {
    const auto special = static_cast<size_t>(id - text::Bytes::size());
    text += special < specials.size() ? specials[special] : text::Bytes::decode({&id, 1});
  }
  return text;
}
int32_t Tokenizer::BytesAndSpecials::special(std::string_view name) const {
  const auto found = std::find(specials.begin(), specials.end(), name);
  CHORALE_CHECK(found != specials.end(), "[Tokenizer] there is no special token ", name);
  return text::Bytes::size() + static_cast<int32_t>(found - specials.begin());
}

Tokenizer Tokenizer::bytes(std::vector<std::string> specials) {
  return Tokenizer(BytesAndSpecials{std::move(specials)});
}
Tokenizer Tokenizer::load(const std::filesystem::path& folder) {
  if (std::filesystem::exists(folder / kBpeFile)) return bpe(text::Bpe::load(folder));
  if (std::filesystem::exists(folder / kWordPieceFile)) return Tokenizer(text::WordPiece::load(folder));
  return bytes();
}
bool Tokenizer::is_in(const std::filesystem::path& folder) {
  return std::filesystem::exists(folder / kBpeFile) || std::filesystem::exists(folder / kWordPieceFile);
}

void Tokenizer::save(const std::filesystem::path& folder) const {
  std::visit([&](const auto& kind) { kind.save(folder); }, kind_);
}
int32_t Tokenizer::size() const {
  return std::visit([](const auto& kind) { return kind.size(); }, kind_);
}
std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  return std::visit([&](const auto& kind) { return kind.encode(text); }, kind_);
}
std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  return std::visit([&](const auto& kind) { return kind.decode(ids); }, kind_);
}
int32_t Tokenizer::special(std::string_view name) const {
  return std::visit([&](const auto& kind) { return kind.special(name); }, kind_);
}
std::string Tokenizer::describe() const {
  if (std::holds_alternative<text::Bpe>(kind_)) return concat(size(), " byte pairs");
  if (std::holds_alternative<text::WordPiece>(kind_)) return concat(size(), " word pieces");
  return "bytes";
}

std::string Utf8Pieces::add(std::string_view bytes) {
  held_ += bytes;
  std::string whole;
  size_t at = 0;
  while (at < held_.size()) {
    const text::Char next = text::char_at(held_, at);
    // The longest beginning of a character that is not one has three bytes.
    if (!next.valid && held_.size() - at < 4 && next.code >= 0xc2 && next.code <= 0xf4) {
      const bool may_go_on = std::all_of(held_.begin() + static_cast<std::ptrdiff_t>(at) + 1, held_.end(),
                                         [](char byte) { return (static_cast<uint8_t>(byte) & 0xc0) == 0x80; });
      if (may_go_on) break;
    }
    if (next.valid) {
      whole += held_.substr(at, next.bytes);
    } else {
      text::append_utf8(whole, 0xfffd);
    }
    at += next.bytes;
  }
  held_.erase(0, at);
  return whole;
}
std::string Utf8Pieces::finish() {
  std::string rest;
  for (size_t at = 0; at < held_.size(); ++at) text::append_utf8(rest, 0xfffd);
  held_.clear();
  return rest;
}
std::string as_utf8(std::string_view bytes) {
  Utf8Pieces pieces;
  std::string text = pieces.add(bytes);
  return text + pieces.finish();
}

}  // namespace chorale::train
