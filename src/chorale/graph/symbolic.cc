#include "chorale/graph/symbolic.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "chorale/base/error.h"
#include "chorale/base/scalar.h"

namespace chorale::graph {
namespace {

// A text cut at its numbers. Names of values (%3), generators (g0), dtypes and ops have digits too: those follow a
// letter, a digit or a %.
struct CutText {
  std::vector<std::string> between;
  std::vector<std::string> numbers;
};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

CutText cut_at_numbers(const std::string& text) {
  CutText cut;
  cut.between.emplace_back();
  for (size_t at = 0; at < text.size();) {
    const char before = at == 0 ? '\n' : text[at - 1];
    const bool may_begin = before == '[' || before == ' ' || before == '=';
    const bool begins =
        may_begin && (is_digit(text[at]) || (text[at] == '-' && at + 1 < text.size() && is_digit(text[at + 1])));
    if (!begins) {
      cut.between.back() += text[at++];
      continue;
    }
    const size_t end = std::min(text.find_first_of(",])}\n", at), text.size());
    const std::string number = text.substr(at, end - at);
    at = end;
    if (number.ends_with('j')) {  // complex: part of the text
      cut.between.back() += number;
      continue;
    }
    cut.numbers.push_back(number);
    cut.between.emplace_back();
  }
  return cut;
}

bool is_floating_text(const std::string& number) { return number.find_first_of(".en") != std::string::npos; }

double power_of(int64_t base, int exponent) {
  double result = 1;
  for (int i = 0; i < std::abs(exponent); ++i) result *= static_cast<double>(base);
  return exponent < 0 ? 1 / result : result;
}

// The product of the powers, exactly; 0 where it is too large for a size.
int64_t product_of(std::span<const int> powers, std::span<const int64_t> sizes) {
  __int128 product = 1;
  for (size_t s = 0; s < powers.size(); ++s) {
    for (int i = 0; i < powers[s]; ++i) {
      product *= sizes[s];
      if (product > (__int128{1} << 62)) return 0;
    }
  }
  return static_cast<int64_t>(product);
}

bool is_near(double a, double b) { return a == b || std::abs(a - b) <= 1e-12 * std::max(std::abs(a), std::abs(b)); }

int64_t floor_divide(__int128 a, int64_t b) {
  const __int128 quotient = a / b;
  return static_cast<int64_t>(a % b != 0 && a < 0 ? quotient - 1 : quotient);
}

// Products of symbols that a number may follow, the simple ones first.
std::vector<std::vector<int>> products(size_t symbols, bool negative) {
  std::vector<std::vector<int>> all;
  const auto add = [&](std::vector<int> powers) {
    all.push_back(powers);
    if (!negative) return;
    for (int& power : powers) power = -power;
    all.push_back(std::move(powers));
  };
  for (size_t a = 0; a < symbols; ++a) {
    std::vector<int> powers(symbols, 0);
    powers[a] = 1;
    add(powers);
  }
  for (size_t a = 0; a < symbols; ++a) {
    for (size_t b = a; b < symbols; ++b) {
      std::vector<int> powers(symbols, 0);
      ++powers[a];
      ++powers[b];
      add(powers);
      for (size_t c = b; c < symbols; ++c) {
        std::vector<int> three = powers;
        ++three[c];
        add(three);
      }
    }
  }
  return all;
}

using Examples = std::span<const SymbolicText::Example>;

std::optional<SizeExpr> learn_floating(Examples examples, const std::vector<double>& seen) {
  SizeExpr expr;
  expr.is_floating = true;
  expr.real = seen.back();
  if (std::all_of(seen.begin(), seen.end(), [&](double x) { return Scalar::same_bits(x, seen[0]); })) return expr;
  for (std::vector<int>& powers : products(examples[0].sizes.size(), true)) {
    expr.powers = std::move(powers);
    expr.real = 1;
    expr.real = seen.back() / expr.real_at(examples.back().sizes);
    if (std::abs(expr.real - std::round(expr.real)) < 1e-9 * std::abs(expr.real)) expr.real = std::round(expr.real);
    bool fits = true;
    for (size_t i = 0; i < seen.size() && fits; ++i) fits = is_near(expr.real_at(examples[i].sizes), seen[i]);
    if (fits) return expr;
  }
  return std::nullopt;
}

bool gives(const SizeExpr& expr, Examples examples, const std::vector<int64_t>& seen) {
  for (size_t i = 0; i < seen.size(); ++i) {
    if (expr.integer_at(examples[i].sizes) != seen[i]) return false;
  }
  return true;
}

std::optional<SizeExpr> learn_integer(Examples examples, const std::vector<int64_t>& seen) {
  SizeExpr expr;
  expr.factor = seen.back();
  if (std::all_of(seen.begin(), seen.end(), [&](int64_t x) { return x == seen[0]; })) return expr;
  const std::vector<std::vector<int>> known = products(examples[0].sizes.size(), false);
  // A multiple of a product.
  for (const std::vector<int>& powers : known) {
    const int64_t unit = product_of(powers, examples.back().sizes);
    if (unit == 0 || seen.back() % unit != 0) continue;
    expr = {.factor = seen.back() / unit, .powers = powers};
    if (expr.factor != 0 && gives(expr, examples, seen)) return expr;
  }
  // A multiple, or a fraction, and something more.
  for (int64_t divisor = 1; divisor <= 16; ++divisor) {
    for (const std::vector<int>& powers : known) {
      const int64_t last = product_of(powers, examples.back().sizes);
      for (size_t i = 0; i + 1 < seen.size(); ++i) {
        const int64_t other = product_of(powers, examples[i].sizes);
        if (other == 0 || last == 0 || other == last) continue;
        const double slope = static_cast<double>(seen.back() - seen[i]) / static_cast<double>(last - other);
        const auto factor = static_cast<int64_t>(std::llround(slope * static_cast<double>(divisor)));
        expr = {.factor = factor, .divisor = divisor, .powers = powers};
        expr.offset = seen.back() - expr.integer_at(examples.back().sizes);
        if (factor != 0 && gives(expr, examples, seen)) return expr;
        break;
      }
    }
  }
  return std::nullopt;
}

size_t line_at(const std::vector<std::string>& between, size_t number) {
  size_t line = 1;
  for (size_t i = 0; i <= number && i < between.size(); ++i) {
    line += static_cast<size_t>(std::count(between[i].begin(), between[i].end(), '\n'));
  }
  return line;
}

std::string line_of_text(const std::string& text, size_t number) {
  size_t at = 0;
  for (size_t line = 1; line < number && at < text.size(); ++line)
    at = std::min(text.find('\n', at), text.size() - 1) + 1;
  const std::string line = text.substr(at, text.find('\n', at) - at);
  return line.substr(std::min(line.find_first_not_of(' '), line.size()));
}

// Where two texts differ in more than numbers, in words.
std::string difference_of(const std::string& one, const std::string& other) {
  const CutText a = cut_at_numbers(one), b = cut_at_numbers(other);
  size_t line = 1;
  for (size_t i = 0; i < std::min(a.between.size(), b.between.size()); ++i) {
    const std::string &first = a.between[i], &second = b.between[i];
    const auto same = std::mismatch(first.begin(), first.end(), second.begin(), second.end()).first;
    line += static_cast<size_t>(std::count(first.begin(), same, '\n'));
    if (first != second) break;
  }
  return concat("`", line_of_text(other, line), "` instead of `", line_of_text(one, line), "`");
}

int64_t integer_of(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  CHORALE_CHECK(error == std::errc{} && end == text.data() + text.size(), "[graph] '", text, "' is no integer");
  return value;
}

}  // namespace

int64_t SizeExpr::integer_at(std::span<const int64_t> sizes) const {
  if (is_constant()) return factor;
  return floor_divide(static_cast<__int128>(factor) * product_of(powers, sizes), divisor) + offset;
}

double SizeExpr::real_at(std::span<const int64_t> sizes) const {
  double value = real;
  for (size_t s = 0; s < powers.size(); ++s) {
    if (powers[s] < 0) value /= power_of(sizes[s], -powers[s]);
    if (powers[s] > 0) value *= power_of(sizes[s], powers[s]);
  }
  return value;
}

std::string SizeExpr::text(std::span<const std::string> symbols) const {
  if (is_constant()) return is_floating ? to_text(real) : concat(factor);
  std::string all = is_floating ? (real == 1 ? "1.0" : to_text(real)) : factor == 1 ? "" : concat(factor);
  for (size_t s = 0; s < powers.size(); ++s) {
    for (int i = 0; i < std::abs(powers[s]); ++i) {
      all += concat(powers[s] < 0 ? "/" : all.empty() ? "" : "*", symbols[s]);
    }
  }
  if (divisor != 1) all += concat("/", divisor);
  if (offset != 0) all += concat(offset > 0 ? "+" : "-", std::abs(offset));
  return all;
}

std::optional<SymbolicText> SymbolicText::learn(std::span<const Example> examples, std::vector<std::string> names,
                                                std::string& why_not) {
  SymbolicText made;
  std::vector<CutText> cuts;
  cuts.reserve(examples.size());
  for (const Example& example : examples) cuts.push_back(cut_at_numbers(example.text));
  for (size_t i = 1; i < cuts.size(); ++i) {
    if (cuts[i].between == cuts[0].between) continue;
    why_not = difference_of(examples[0].text, examples[i].text);
    return std::nullopt;
  }
  made.hints_ = examples.back().sizes;
  made.names_ = std::move(names);
  made.between_ = cuts.back().between;
  for (size_t n = 0; n < cuts[0].numbers.size(); ++n) {
    bool is_floating = false;
    for (const CutText& cut : cuts) is_floating |= is_floating_text(cut.numbers[n]);
    std::optional<SizeExpr> expr;
    if (is_floating) {
      std::vector<double> seen;
      seen.reserve(cuts.size());
      for (const CutText& cut : cuts) seen.push_back(std::strtod(cut.numbers[n].c_str(), nullptr));
      expr = learn_floating(examples, seen);
    } else {
      std::vector<int64_t> seen;
      seen.reserve(cuts.size());
      for (const CutText& cut : cuts) seen.push_back(integer_of(cut.numbers[n]));
      expr = learn_integer(examples, seen);
    }
    if (!expr) {
      const size_t line = line_at(cuts[0].between, n);
      why_not = concat("no expression gives both `", line_of_text(examples.front().text, line), "` and `",
                       line_of_text(examples.back().text, line), "`");
      return std::nullopt;
    }
    made.numbers_.push_back(std::move(*expr));
  }
  return made;
}

bool SymbolicText::uses(size_t symbol) const {
  return std::any_of(numbers_.begin(), numbers_.end(),
                     [&](const SizeExpr& expr) { return symbol < expr.powers.size() && expr.powers[symbol] != 0; });
}

std::string SymbolicText::text() const {
  std::string all;
  for (size_t i = 0; i < between_.size(); ++i) {
    all += between_[i];
    if (i < numbers_.size()) all += numbers_[i].text(names_);
  }
  std::string head;
  for (size_t s = 0; s < names_.size(); ++s) {
    if (uses(s)) head += concat(head.empty() ? "[" : ", ", names_[s], "=", hints_[s]);
  }
  constexpr std::string_view kWord = "graph";
  if (!head.empty() && all.starts_with(kWord)) all.insert(kWord.size(), head + "]");
  return all;
}

std::string SymbolicText::at(std::span<const int64_t> sizes) const {
  std::string all;
  for (size_t i = 0; i < between_.size(); ++i) {
    all += between_[i];
    if (i >= numbers_.size()) continue;
    all += numbers_[i].is_floating ? to_text(numbers_[i].real_at(sizes)) : concat(numbers_[i].integer_at(sizes));
  }
  return all;
}

std::string SymbolicText::mismatch(const std::string& text, std::span<const int64_t> sizes) const {
  const CutText cut = cut_at_numbers(text);
  if (cut.between != between_) return difference_of(at(sizes), text);
  for (size_t n = 0; n < numbers_.size(); ++n) {
    const bool same = numbers_[n].is_floating
                          ? is_near(std::strtod(cut.numbers[n].c_str(), nullptr), numbers_[n].real_at(sizes))
                          : cut.numbers[n] == concat(numbers_[n].integer_at(sizes));
    if (same) continue;
    const size_t line = line_at(between_, n);
    return concat("`", line_of_text(text, line), "` instead of `", line_of_text(at(sizes), line), "`");
  }
  return {};
}

SymbolicText SymbolicText::parse(const std::string& text) {
  SymbolicText made;
  std::string body = text;
  if (text.starts_with("graph[")) {
    const size_t end = text.find(']');
    CHORALE_CHECK(end != std::string::npos, "[graph] line 1: the list of symbols has no end");
    std::string head = text.substr(6, end - 6);
    while (!head.empty()) {
      const size_t equal = head.find('='), comma = std::min(head.find(", "), head.size());
      CHORALE_CHECK(equal != std::string::npos && equal < comma, "[graph] line 1: expected NAME=SIZE, found '", head,
                    "'");
      made.names_.push_back(head.substr(0, equal));
      made.hints_.push_back(integer_of(head.substr(equal + 1, comma - equal - 1)));
      head.erase(0, std::min(comma + 2, head.size()));
    }
    body = "graph" + text.substr(end + 1);
  }
  const auto symbol_at = [&](const std::string& from, size_t at) {
    for (size_t s = 0; s < made.names_.size(); ++s) {
      const std::string& name = made.names_[s];
      const char behind = at + name.size() < from.size() ? from[at + name.size()] : ' ';
      if (from.compare(at, name.size(), name) == 0 && !is_digit(behind) && !std::isalpha(behind)) return s;
    }
    return SIZE_MAX;
  };
  // An expression stands where a number may: one that begins with a symbol gets a factor for that.
  std::string plain;
  for (size_t at = 0; at < body.size(); ++at) {
    const char before = at == 0 ? '\n' : body[at - 1];
    if ((before == '[' || before == ' ' || before == '=') && symbol_at(body, at) != SIZE_MAX) plain += "1*";
    plain += body[at];
  }
  const CutText cut = cut_at_numbers(plain);
  made.between_ = cut.between;
  for (const std::string& number : cut.numbers) {
    SizeExpr expr;
    size_t at = std::min(number.find_first_of("*/"), number.size());
    if (at < number.size()) expr.powers.assign(made.names_.size(), 0);
    const std::string first = number.substr(0, at);
    expr.is_floating = is_floating_text(first);
    if (expr.is_floating) {
      expr.real = std::strtod(first.c_str(), nullptr);
    } else {
      expr.factor = integer_of(first);
    }
    while (at < number.size()) {
      const char sign = number[at++];
      if (sign == '+' || sign == '-') {
        expr.offset = integer_of(number.substr(at)) * (sign == '+' ? 1 : -1);
        break;
      }
      const size_t symbol = symbol_at(number, at);
      if (symbol == SIZE_MAX) {
        const size_t end = std::min(number.find_first_of("*/+-", at), number.size());
        expr.divisor = integer_of(number.substr(at, end - at));
        CHORALE_CHECK(sign == '/' && expr.divisor > 0, "[graph] '", number, "' is no expression of a size");
        at = end;
        continue;
      }
      expr.powers[symbol] += sign == '*' ? 1 : -1;
      at += made.names_[symbol].size();
    }
    made.numbers_.push_back(std::move(expr));
  }
  return made;
}

}  // namespace chorale::graph
