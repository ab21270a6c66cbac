#include "chorale/api/family.h"

#include <algorithm>

#include "chorale/base/error.h"

namespace chorale::compiled {
namespace {

// Examples beyond that teach nothing new.
constexpr size_t kMostExamples = 8;

bool may_be_symbol(int64_t size) { return size > 1; }

}  // namespace

Family::Family(size_t ordinal, std::shared_ptr<const Segment> segment, Example example)
    : ordinal_(ordinal), segment_(std::move(segment)), examples_{std::move(example)} {
  find_symbols();
}

Family::Family(const Family& before, std::shared_ptr<const Segment> segment, Example example)
    : ordinal_(before.ordinal_), segment_(std::move(segment)), examples_(before.examples_) {
  examples_.push_back(std::move(example));
  find_symbols();
  if (is_dynamic() && learn(why_fixed_)) return;
  examples_.erase(examples_.begin(), examples_.end() - 1);
  find_symbols();
}

void Family::find_symbols() {
  symbols_.clear();
  const std::vector<SizeSource>& first = examples_.front().sources;
  const auto seen = [&](size_t source) {
    std::vector<int64_t> values;
    values.reserve(examples_.size());
    for (const Example& example : examples_) values.push_back(example.sources[source].value);
    return values;
  };
  for (size_t i = 0; i < first.size(); ++i) {
    const std::vector<int64_t> values = seen(i);
    const bool changes = std::any_of(values.begin(), values.end(), [&](int64_t v) { return v != values[0]; });
    const auto mark_at = [&](size_t source) { return examples_.back().sources[source].mark; };
    if (!changes && mark_at(i) == Mark::kNone) continue;
    if (!std::all_of(values.begin(), values.end(), may_be_symbol)) {
      if (!changes) continue;  // marked, and 0 or 1: it stays so
      symbols_.clear();
      why_fixed_ = concat(first[i].name, " was 0 or 1, which is compiled by itself");
      return;
    }
    const auto same = std::find_if(symbols_.begin(), symbols_.end(), [&](const std::vector<size_t>& symbol) {
      return mark_at(i) != Mark::kOwn && mark_at(symbol[0]) != Mark::kOwn && seen(symbol[0]) == values;
    });
    if (same == symbols_.end()) {
      symbols_.push_back({i});
    } else {
      same->push_back(i);
    }
  }
}

bool Family::is_comparable(const Example& example) const {
  const Example& first = examples_.front();
  return first.texts.size() == example.texts.size() &&
         std::equal(first.sources.begin(), first.sources.end(), example.sources.begin(), example.sources.end(),
                    [](const SizeSource& a, const SizeSource& b) { return a.name == b.name; });
}

std::vector<int64_t> Family::sizes_of(const Example& example, std::string& why_not, bool& is_own) const {
  is_own = false;
  std::vector<bool> is_symbol(example.sources.size(), false);
  std::vector<int64_t> sizes;
  for (const std::vector<size_t>& symbol : symbols_) {
    const SizeSource& first = example.sources[symbol[0]];
    for (const size_t i : symbol) {
      is_symbol[i] = true;
      if (example.sources[i].value == first.value) continue;
      is_own = true;
      why_not = concat(example.sources[i].name, " is ", example.sources[i].value, ", expected that of ", first.name,
                       ", ", first.value);
      return {};
    }
    if (!may_be_symbol(first.value)) {
      why_not = concat(first.name, " is ", first.value, ", which is compiled by itself");
      return {};
    }
    sizes.push_back(first.value);
  }
  for (size_t i = 0; i < example.sources.size(); ++i) {
    const SizeSource &now = example.sources[i], &then = examples_.back().sources[i];
    if (is_symbol[i] || now.value == then.value) continue;
    why_not = concat(now.name, " is ", now.value, ", expected ", then.value);
    return {};
  }
  return sizes;
}

std::vector<std::string> Family::names() const {
  std::vector<std::string> all;
  all.reserve(symbols_.size());
  size_t sizes = 0, late = 0;
  for (const std::vector<size_t>& symbol : symbols_) {
    all.push_back(examples_.back().sources[symbol[0]].is_late ? concat("u", late++) : concat("s", sizes++));
  }
  return all;
}

bool Family::learn(std::string& why_not) {
  texts_.clear();
  for (size_t t = 0; t < examples_.back().texts.size(); ++t) {
    std::vector<graph::SymbolicText::Example> all;
    for (const Example& example : examples_) {
      graph::SymbolicText::Example one;
      for (const std::vector<size_t>& symbol : symbols_) one.sizes.push_back(example.sources[symbol[0]].value);
      one.text = example.texts[t];
      all.push_back(std::move(one));
    }
    std::optional<graph::SymbolicText> text = graph::SymbolicText::learn(all, names(), why_not);
    if (!text) {
      texts_.clear();
      return false;
    }
    texts_.push_back(std::move(*text));
  }
  return true;
}

std::string Family::mismatch(const Example& example, bool& is_own) {
  is_own = false;
  if (!is_comparable(example)) return "other tensors come from outside";
  std::string why_not;
  const std::vector<int64_t> sizes = sizes_of(example, why_not, is_own);
  if (!why_not.empty()) return why_not;
  is_own = true;
  if (!is_dynamic()) return "another graph for the same sizes";
  if (texts_.empty()) {
    // Marked, and seen once: the second size says what follows from the marks.
    return teach(std::vector<Example>{example});
  }
  for (size_t t = 0; t < texts_.size(); ++t) {
    why_not = texts_[t].mismatch(example.texts[t], sizes);
    if (why_not.empty()) continue;
    // What was the same number in all examples may follow from a symbol that was, too: this one tells.
    const std::vector<graph::SymbolicText> before = texts_;
    if (is_first_change(sizes) && teach(std::vector<Example>{example}).empty()) return {};
    texts_ = before;
    return why_not;
  }
  if (examples_.size() < kMostExamples) examples_.insert(examples_.begin(), example);
  return {};
}

bool Family::is_first_change(const std::vector<int64_t>& sizes) const {
  for (size_t s = 0; s < symbols_.size(); ++s) {
    const auto value_in = [&](const Example& example) { return example.sources[symbols_[s][0]].value; };
    const int64_t known = value_in(examples_.front());
    const bool never_changed =
        std::all_of(examples_.begin(), examples_.end(), [&](const Example& one) { return value_in(one) == known; });
    if (never_changed && sizes[s] != known) return true;
  }
  return false;
}

std::string Family::teach(const std::vector<Example>& examples) {
  std::string why_not;
  for (const Example& example : examples) {
    if (!is_comparable(example)) return "another number of tensors comes from outside";
    bool is_own = false;
    sizes_of(example, why_not, is_own);
    if (!why_not.empty()) return why_not;
  }
  examples_.insert(examples_.begin(), examples.begin(), examples.end());
  if (!learn(why_not)) examples_.erase(examples_.begin(), examples_.begin() + static_cast<int64_t>(examples.size()));
  return why_not;
}

std::vector<std::vector<SizeSource>> Family::symbols() const {
  std::vector<std::vector<SizeSource>> all;
  for (const std::vector<size_t>& symbol : symbols_) {
    all.emplace_back();
    for (const size_t i : symbol) all.back().push_back(examples_.back().sources[i]);
  }
  return all;
}

void Family::fix(const std::string& source) {
  for (Example& example : examples_) {
    for (SizeSource& one : example.sources) {
      if (one.name == source) one.mark = Mark::kNone;
    }
  }
  find_symbols();
}

std::vector<std::string> Family::texts() const {
  if (texts_.empty()) return examples_.back().texts;
  std::vector<std::string> all;
  all.reserve(texts_.size());
  for (const graph::SymbolicText& text : texts_) all.push_back(text.text());
  return all;
}

std::vector<std::string> Family::guards() const {
  std::vector<std::string> all;
  const std::vector<std::string> symbol_names = names();
  all.reserve(symbols_.size());
  for (size_t s = 0; s < symbols_.size(); ++s) {
    std::string names;
    for (const size_t i : symbols_[s]) names += concat(examples_.back().sources[i].name, " = ");
    const bool is_late = examples_.back().sources[symbols_[s][0]].is_late;
    all.push_back(concat(names, symbol_names[s], is_late ? ", known when it runs" : ", at least 2"));
  }
  return all;
}

}  // namespace chorale::compiled
