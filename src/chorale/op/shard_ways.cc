#include "chorale/op/shard_ways.h"

#include <algorithm>
#include <cctype>
#include <ostream>

#include "chorale/base/error.h"

namespace chorale::op {
namespace {

// Stand for the dimensions behind "..."; rules use the letters of the alphabet.
constexpr std::string_view kSpareLetters = "01234567";

std::string spare_letters(int64_t count) {
  return std::string(kSpareLetters.substr(kSpareLetters.size() - static_cast<size_t>(std::max<int64_t>(count, 0))));
}

bool is_whole(char letter) { return std::isupper(static_cast<unsigned char>(letter)) != 0; }

// One operand or result of labels, its dimensions spelled out.
struct Labelled {
  std::string letters;
  bool added = false;  // a "+" stood before it
};

std::vector<std::string> split_at_commas(std::string_view text) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else if (c != ' ') {
      parts.back() += c;
    }
  }
  return parts;
}

Labelled spell_out(const ShardCall& call, std::string labels, int64_t dims) {
  Labelled result;
  if (dims < 0) return result;  // absent
  const std::string written = labels;
  if (!labels.empty() && labels[0] == '+') {
    result.added = true;
    labels.erase(0, 1);
  }
  if (const size_t dots = labels.find("..."); dots != std::string::npos) {
    const int64_t named = static_cast<int64_t>(labels.size()) - 3;
    CHORALE_INVARIANT(dims >= named, "[", call.op.name, "] sharding labels '", written, "' name ", named,
                      " dimensions, but there are ", dims);
    labels.replace(dots, 3, spare_letters(dims - named));  // aligned from the right, as broadcasting is
  }
  CHORALE_INVARIANT(static_cast<int64_t>(labels.size()) == dims, "[", call.op.name, "] sharding labels '", written,
                    "' do not fit the number of dimensions, ", dims);
  for (char c : labels) {
    CHORALE_INVARIANT(std::isalnum(static_cast<unsigned char>(c)), "[", call.op.name, "] sharding label '", c,
                      "' is no letter");
  }
  result.letters = std::move(labels);
  return result;
}

struct Labels {
  std::vector<Labelled> in, out;

  Labels(const ShardCall& call, std::string_view text) {
    if (text == kElementwiseLabels) {
      for (size_t i = 0; i < call.in.size(); ++i) in.push_back({spare_letters(call.dims(i))});
      for (const Shape& sizes : call.out) out.push_back({spare_letters(static_cast<int64_t>(sizes.size()))});
      return;
    }
    const size_t arrow = text.find("->");
    CHORALE_INVARIANT(arrow != std::string::npos, "[", call.op.name, "] sharding rule '", text, "' has no '->'");
    std::vector<std::string> operands = split_at_commas(text.substr(0, arrow)),
                             results = split_at_commas(text.substr(arrow + 2));
    if (call.in.empty() && operands.size() == 1 && operands[0].empty()) operands.clear();
    CHORALE_INVARIANT(operands.size() == call.in.size(), "[", call.op.name, "] sharding rule '", text, "' has ",
                      operands.size(), " operands, the call has ", call.in.size());
    CHORALE_INVARIANT(results.size() == call.out.size(), "[", call.op.name, "] sharding rule '", text, "' has ",
                      results.size(), " results, the call has ", call.out.size());
    for (size_t i = 0; i < operands.size(); ++i) in.push_back(spell_out(call, operands[i], call.dims(i)));
    for (size_t i = 0; i < results.size(); ++i) {
      out.push_back(spell_out(call, results[i], static_cast<int64_t>(call.out[i].size())));
    }
  }
};

// The size that each small letter stands for, in order of appearance. An operand may have 1 instead: it is repeated.
std::vector<std::pair<char, int64_t>> sizes_of(const ShardCall& call, const Labels& labels) {
  std::vector<std::pair<char, int64_t>> sizes;
  const auto collect = [&](const std::string& letters, const Shape& shape) {
    for (size_t d = 0; d < letters.size(); ++d) {
      if (is_whole(letters[d])) continue;
      const auto at =
          std::find_if(sizes.begin(), sizes.end(), [&](const auto& entry) { return entry.first == letters[d]; });
      if (at == sizes.end()) {
        sizes.emplace_back(letters[d], shape[d]);
      } else if (at->second == 1) {
        at->second = shape[d];
      } else {
        CHORALE_INVARIANT(shape[d] == at->second || shape[d] == 1, "[", call.op.name, "] sharding label '", letters[d],
                          "' stands for ", at->second, " and for ", shape[d]);
      }
    }
  };
  for (size_t i = 0; i < call.in.size(); ++i) {
    if (call.in[i].defined()) collect(labels.in[i].letters, call.in[i].sizes());
  }
  for (size_t i = 0; i < call.out.size(); ++i) collect(labels.out[i].letters, call.out[i]);
  return sizes;
}

// The placement of a tensor whose dimension of this letter, if it has one of this size, is split.
Placement split_along(const std::string& letters, const Shape& shape, char letter, int64_t size) {
  const size_t at = letters.find(letter);
  if (at == std::string::npos || shape[at] != size) return {};
  return Placement::shard(static_cast<int64_t>(at));
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const ShardWay& way) {
  const auto list = [&](const std::vector<Placement>& placements) {
    for (size_t i = 0; i < placements.size(); ++i) out << (i ? ", " : "") << placements[i];
  };
  list(way.in);
  out << (way.in.empty() ? "-> " : " -> ");
  list(way.out);
  return out;
}

bool can_split(int64_t size, int64_t shards, Parts parts) {
  switch (parts) {
    case Parts::kAny:
      return true;
    case Parts::kNotEmpty:
      return chunk_of(size, shards, shards - 1).size > 0;
    case Parts::kEqual:
      return size % shards == 0;
  }
  return false;
}

void ShardWays::split(std::string_view text, Partial partial, Parts parts) {
  const Labels labels(call_, text);
  for (const auto& [letter, size] : sizes_of(call_, labels)) {
    if (!can_split(size, call_.shards, parts)) continue;
    ShardWay way;
    bool contracted = false;
    for (size_t i = 0; i < call_.out.size(); ++i) {
      Placement placement = split_along(labels.out[i].letters, call_.out[i], letter, size);
      if (!placement.is_shard()) {
        CHORALE_INVARIANT(!partial.none(), "[", call_.op.name, "] sharding rule '", text, "' does not say what result ",
                          i, " is when ", letter, " is split");
        placement = Placement::partial(partial);
        contracted = true;
      }
      way.out.push_back(placement);
    }
    for (size_t i = 0; i < call_.in.size(); ++i) {
      Placement placement;
      if (call_.in[i].defined()) {
        placement = split_along(labels.in[i].letters, call_.in[i].sizes(), letter, size);
        if (contracted && labels.in[i].added && !placement.is_shard()) placement = Placement::partial(partial);
      }
      way.in.push_back(placement);
    }
    add(std::move(way.in), std::move(way.out));
  }
}

void ShardWays::add(std::vector<Placement> in, std::vector<Placement> out) {
  CHORALE_INVARIANT(in.size() == call_.in.size() && out.size() == call_.out.size(), "[", call_.op.name,
                    "] a sharding rule places ", in.size(), " operands and ", out.size(), " results of ",
                    call_.in.size(), " and ", call_.out.size());
  for (size_t i = 0; i < in.size(); ++i) {
    if (!call_.in[i].defined()) in[i] = {};
  }
  ShardWay way{std::move(in), std::move(out)};
  if (std::find(ways_.begin(), ways_.end(), way) == ways_.end()) ways_.push_back(std::move(way));
}

void ShardWays::pass(const Linear& linear, Reduce kind) {
  // Terms whose inputs are all absent do not count. One factor of each of the others is partial: `choices` counts
  // through all combinations.
  std::vector<std::vector<size_t>> terms;
  if (linear.each) {
    for (size_t i = 0; i < call_.in.size(); ++i) terms.push_back({i});
  } else {
    for (uint8_t factors : linear.terms) {
      std::vector<size_t> term;
      for (size_t i = 0; i < call_.in.size() && i < 8; ++i) {
        if (factors >> i & 1u && call_.in[i].defined()) term.push_back(i);
      }
      if (!term.empty()) terms.push_back(std::move(term));
    }
  }
  if (terms.empty()) return;
  size_t combinations = 1;
  for (const auto& term : terms) combinations *= term.size();
  for (size_t choices = 0; choices < combinations; ++choices) {
    std::vector<Placement> in(call_.in.size());
    size_t rest = choices;
    bool fits = true;
    for (const auto& term : terms) {
      const size_t chosen = term[rest % term.size()];
      rest /= term.size();
      in[chosen] = Placement::partial(kind);
      // bool adds as "or", and an average of integers is none.
      const DType dtype = call_.in[chosen].dtype();
      fits = fits && dtype != DType::kBool && (kind != Reduce::kAverage || is_differentiable(dtype));
    }
    if (fits) add(std::move(in), std::vector<Placement>(call_.out.size(), Placement::partial(kind)));
  }
}

void ShardWays::pass(const Linear& linear) {
  pass(linear, Reduce::kSum);
  pass(linear, Reduce::kAverage);
}

void ShardWays::pass(const Monotone& monotone) {
  // Complex numbers have no order.
  if (std::any_of(call_.in.begin(), call_.in.end(),
                  [](const Tensor& x) { return x.defined() && is_complex(x.dtype()); }))
    return;
  for (size_t i = 0; i < call_.in.size() && i < 8; ++i) {
    const bool rises = monotone.rises >> i & 1u, falls = monotone.falls >> i & 1u;
    if ((!rises && !falls) || !call_.in[i].defined()) continue;
    for (Reduce kind : {Reduce::kMax, Reduce::kMin}) {
      std::vector<Placement> in(call_.in.size());
      in[i] = Placement::partial(kind);
      const Reduce other = kind == Reduce::kMax ? Reduce::kMin : Reduce::kMax;
      add(std::move(in), std::vector<Placement>(call_.out.size(), Placement::partial(rises ? kind : other)));
    }
  }
}

std::vector<ShardWay> shard_ways(const ShardCall& call) {
  ShardWays ways(call);
  const ShardRule& rule = call.op.shard;
  if (rule.labels) ways.split(rule.labels, rule.partial);
  if (rule.ways) rule.ways(call, ways);
  ways.pass(call.op.linear);
  ways.pass(call.op.monotone);
  return ways.take();
}

Attrs local_attrs(const ShardCall& call, std::span<const Part> in, std::span<const Part> out) {
  return call.op.shard.local ? call.op.shard.local(call, in, out) : call.attrs;
}

std::vector<int64_t> stretch_place(const ShardCall& call, std::span<const Part> in, std::span<const Part> out) {
  const ShardRule& rule = call.op.shard;
  if (rule.stretch < 0 || !call.in[static_cast<size_t>(rule.stretch)].defined()) return {};
  const Drawn drawn = rule.drawn ? rule.drawn(call, in, out) : Drawn{call.out[0], out[0]};
  std::vector<int64_t> place;
  if (drawn.part.sizes == drawn.whole) return place;
  for (size_t d = 0; d < drawn.whole.size(); ++d) {
    place.push_back(drawn.part.first[d]);
    place.push_back(drawn.whole[d]);
  }
  return place;
}

std::string letters(int64_t dims, char first) {
  std::string labels;
  for (int64_t i = 0; i < dims; ++i) labels += static_cast<char>(first + i);
  return labels;
}

std::string keep_whole(std::string labels, int64_t dim) {
  if (labels.empty()) return labels;
  char& letter = labels[static_cast<size_t>(normalize_dim("keep_whole", dim, static_cast<int64_t>(labels.size())))];
  letter = static_cast<char>(std::toupper(letter));
  return labels;
}

std::string keep_whole(std::string labels) {
  for (char& letter : labels) letter = static_cast<char>(std::toupper(letter));
  return labels;
}

std::string replaced(std::string labels, int64_t dim, char letter) {
  if (labels.empty()) return labels;
  labels[static_cast<size_t>(normalize_dim("replaced", dim, static_cast<int64_t>(labels.size())))] = letter;
  return labels;
}

std::string join(const std::vector<std::string>& in, const std::vector<std::string>& out) {
  std::string labels;
  for (size_t i = 0; i < in.size(); ++i) labels += (i ? "," : "") + in[i];
  labels += "->";
  for (size_t i = 0; i < out.size(); ++i) labels += (i ? "," : "") + out[i];
  return labels;
}

std::string without(std::string labels, int64_t dim) {
  if (labels.empty()) return labels;
  return labels.erase(static_cast<size_t>(normalize_dim("without", dim, static_cast<int64_t>(labels.size()))), 1);
}

}  // namespace chorale::op
