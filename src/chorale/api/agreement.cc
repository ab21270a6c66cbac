#include "chorale/api/agreement.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

#include "chorale/base/error.h"

namespace chorale::compiled {
namespace {

std::string without_ranks(const std::string& text) {
  constexpr std::string_view kWord = " rank=";
  std::string kept;
  for (size_t at = 0; at < text.size();) {
    const size_t found = std::min(text.find(kWord, at), text.size());
    kept.append(text, at, found - at);
    at = found;
    if (at == text.size()) break;
    at += kWord.size();
    while (at < text.size() && text[at] >= '0' && text[at] <= '9') ++at;
  }
  return kept;
}

// FNV-1a.
int64_t fingerprint(std::string_view text) {
  uint64_t sum = 14695981039346656037u;
  for (const char c : text) sum = (sum ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return static_cast<int64_t>(sum);
}

std::vector<Tensor> gather(const comm::Group& group, const Tensor& mine) {
  std::vector<Tensor> all;
  all.reserve(static_cast<size_t>(group.size()));
  for (int r = 0; r < group.size(); ++r) all.push_back(Tensor::empty(mine.sizes(), mine.dtype()));
  group.all_gather(all, mine).wait();
  return all;
}

// Line `number` of a text, without what indents it; past the end: nothing.
std::string line_of(std::string_view text, size_t number) {
  for (size_t line = 0; line < number && !text.empty(); ++line) {
    text.remove_prefix(std::min(text.find('\n'), text.size() - 1) + 1);
  }
  if (text.empty()) return "nothing";
  text = text.substr(0, text.find('\n'));
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  return std::string(text);
}

}  // namespace

std::optional<Difference> first_difference(const std::string& first, const std::string& second) {
  if (first == second) return std::nullopt;
  size_t line = 0;
  while (line_of(first, line) == line_of(second, line)) ++line;
  return Difference{line + 1, line_of(first, line), line_of(second, line)};
}

void check_agreement(const comm::Group& group, const std::string& text) {
  if (group.size() == 1) return;
  const std::string own = without_ranks(text);
  const auto length = static_cast<int64_t>(own.size());
  const std::vector<Tensor> heads = gather(group, Tensor::from<int64_t>({fingerprint(own), length}, {2}));
  const auto head = [&](size_t r) { return heads[r].to_vector<int64_t>(); };
  int64_t longest = 0;
  bool same = true;
  for (size_t r = 0; r < heads.size(); ++r) {
    longest = std::max(longest, head(r)[1]);
    same &= head(r) == head(0);
  }
  if (same) return;
  // All ranks see that, so all go on.
  std::vector<uint8_t> bytes(static_cast<size_t>(longest), '\0');
  std::memcpy(bytes.data(), own.data(), own.size());
  const std::vector<Tensor> texts = gather(group, Tensor::from<uint8_t>(bytes, {longest}));
  const auto text_of = [&](size_t r) {
    const std::vector<uint8_t> all = texts[r].to_vector<uint8_t>();
    return std::string(all.begin(), all.begin() + head(r)[1]);
  };
  const std::string first = text_of(0);
  for (size_t r = 1; r < texts.size(); ++r) {
    const std::optional<Difference> found = first_difference(first, text_of(r));
    if (!found) continue;
    throw StateError(concat("[compile] ranks compiled different graphs: they differ first at line ", found->line,
                            ", which is `", found->first, "` on rank 0 and `", found->second, "` on rank ", r,
                            "; every rank must run the same code on tensors of the same shapes"));
  }
}

bool all_have_one(const comm::Group& group, bool has_one) {
  const Tensor all = Tensor::from<int64_t>({has_one ? 1 : 0}, {1});
  group.all_reduce(all, Reduce::kMin).wait();
  return all.to_vector<int64_t>()[0] == 1;
}

}  // namespace chorale::compiled
