#include "chorale/train/tokenizer.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/text/bytes.h"
#include "chorale/text/unicode.h"

namespace chorale::train {

Tokenizer Tokenizer::bytes(std::vector<std::string> specials) {
  Tokenizer tokenizer{std::optional<text::Bpe>()};
  tokenizer.specials_ = std::move(specials);
  return tokenizer;
}
Tokenizer Tokenizer::load(const std::filesystem::path& folder, std::vector<std::string> specials) {
  if (std::filesystem::exists(folder / "vocab.json")) return bpe(text::Bpe::load(folder));
  return bytes(std::move(specials));
}
void Tokenizer::save(const std::filesystem::path& folder) const {
  if (bpe_) bpe_->save(folder);
}

int32_t Tokenizer::size() const {
  return bpe_ ? bpe_->size() : text::Bytes::size() + static_cast<int32_t>(specials_.size());
}
std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  return bpe_ ? bpe_->encode(text) : text::Bytes::encode(text);
}
std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  if (bpe_) return bpe_->decode(ids);
  std::string text;
  for (const int32_t id : ids) {
    const auto special = static_cast<size_t>(id - text::Bytes::size());
    text += special < specials_.size() ? specials_[special] : text::Bytes::decode({&id, 1});
  }
  return text;
}
int32_t Tokenizer::special(std::string_view name) const {
  if (bpe_) return bpe_->special(name);
  const auto found = std::find(specials_.begin(), specials_.end(), name);
  CHORALE_CHECK(found != specials_.end(), "[Tokenizer] there is no special token ", name);
  return text::Bytes::size() + static_cast<int32_t>(found - specials_.begin());
}
std::string Tokenizer::describe() const { return bpe_ ? concat(size(), " byte pairs") : "bytes"; }

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
