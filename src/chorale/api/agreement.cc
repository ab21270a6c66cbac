#include "chorale/api/agreement.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

#include "chorale/api/compile.h"
#include "chorale/base/error.h"
#include "chorale/base/log.h"

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

// Where the value of an attribute ends that begins at `at`: a number, or a list.
size_t end_of_value(const std::string& text, size_t at) {
  if (at < text.size() && text[at] == '[') return std::min(text.find(']', at), text.size());
  return std::min(text.find_first_of(",}\n", at), text.size());
}

// The text with a # for each number but those of values, dimensions and roots: what is the same at all sizes.
std::string without_sizes(const std::string& text) {
  constexpr std::string_view kNoSizes[] = {" dim=", "{dim=", " dims=", "{dims=", " root=", "{root="};
  std::string kept;
  bool in_number = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto stands_here = [&](std::string_view name) { return text.compare(i, name.size(), name) == 0; };
    if (const auto name = std::find_if(std::begin(kNoSizes), std::end(kNoSizes), stands_here);
        name != std::end(kNoSizes)) {
      const size_t end = end_of_value(text, i + name->size());
      kept.append(text, i, end - i);
      i = end - 1;
      in_number = false;
      continue;
    }
    const bool is_digit = text[i] >= '0' && text[i] <= '9';
    const char before = i == 0 ? ' ' : text[i - 1];
    const bool begins = before == '[' || before == ' ' || before == '=' || before == ',';
    in_number = is_digit && (in_number || begins);
    if (!in_number) {
      kept += text[i];
    } else if (begins) {
      kept += '#';
    }
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

std::vector<std::string> gather_texts(const comm::Group& group, const std::string& own) {
  const auto length = static_cast<int64_t>(own.size());
  const std::vector<Tensor> heads = gather(group, Tensor::from<int64_t>({length}, {1}));
  std::vector<int64_t> lengths;
  for (const Tensor& head : heads) lengths.push_back(head.to_vector<int64_t>()[0]);
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::string> all(lengths.size());
  if (longest == 0) return all;
  std::vector<uint8_t> bytes(static_cast<size_t>(longest), '\0');
  std::memcpy(bytes.data(), own.data(), own.size());
  const std::vector<Tensor> texts = gather(group, Tensor::from<uint8_t>(bytes, {longest}));
  for (size_t r = 0; r < all.size(); ++r) {
    const std::vector<uint8_t> of_rank = texts[r].to_vector<uint8_t>();
    all[r].assign(of_rank.begin(), of_rank.begin() + lengths[r]);
  }
  return all;
}

void check_agreement(const comm::Group& group, const std::string& text, bool sizes_may_differ) {
  if (group.size() == 1) return;
  const std::string own = sizes_may_differ ? without_sizes(without_ranks(text)) : without_ranks(text);
  const std::vector<Tensor> marks = gather(group, Tensor::from<int64_t>({fingerprint(own)}, {1}));
  const auto mark = [&](size_t r) { return marks[r].to_vector<int64_t>()[0]; };
  bool same = true;
  for (size_t r = 0; r < marks.size(); ++r) same &= mark(r) == mark(0);
  if (same) return;
  // All ranks see that, so all go on.
  const std::vector<std::string> texts = gather_texts(group, own);
  for (size_t r = 1; r < texts.size(); ++r) {
    const std::optional<Difference> found = first_difference(texts[0], texts[r]);
    if (!found) continue;
    throw StateError(concat("[compile] ranks compiled different graphs: they differ first at line ", found->line,
                            ", which is `", found->first, "` on rank 0 and `", found->second, "` on rank ", r,
                            "; every rank must run the same code on tensors of the same shapes"));
  }
}

Backend agreeing(Backend backend, const comm::Group& group) {
  return [backend = std::move(backend), &group](graph::Graph graph, const GraphInfo& info) {
    std::shared_ptr<const graph::Program> program = backend(graph, info);
    const graph::RecordingPaused paused;
    const std::vector<std::string> makers = gather_texts(group, program->maker());
    const auto other = std::find_if(makers.begin(), makers.end(), [&](const auto& one) { return one != makers[0]; });
    if (other == makers.end()) return program;
    const auto text = [](const std::string& maker) { return maker.empty() ? "kernels of the ops" : maker.c_str(); };
    log_warning(concat("[compile] a graph runs op by op on all ranks: rank 0 would run it with ", text(makers[0]),
                       ", rank ", other - makers.begin(), " with ", text(*other)));
    return joint_eager()(std::move(graph), info);
  };
}

bool all_have_one(const comm::Group& group, bool has_one) {
  const Tensor all = Tensor::from<int64_t>({has_one ? 1 : 0}, {1});
  group.all_reduce(all, Reduce::kMin).wait();
  return all.to_vector<int64_t>()[0] == 1;
}

}  // namespace chorale::compiled
