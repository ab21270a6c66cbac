#include "chorale/vec/expression.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <string>

#include "chorale/base/error.h"

namespace chorale::vec {
namespace {

// Recursive descent over the text of one operation: word(args…), a word that names an input, p0 … p3, or a literal.
class Reader {
 public:
  explicit Reader(ScalarOp op) : text_(info(op).text) {
    const std::string_view list = info(op).inputs;
    for (size_t at = 0; at < list.size(); ++at) {
      const size_t begin = at;
      while (at < list.size() && is_word(list[at])) ++at;
      if (at > begin) inputs_.push_back(list.substr(begin, at - begin));
    }
    read();
    skip_spaces();
    CHORALE_INVARIANT(at_ == text_.size(), "the expression '", text_, "' goes on behind its end");
  }
  Expression take() { return {std::move(terms_)}; }

 private:
  static bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }
  void skip_spaces() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  bool accept(char c) {
    skip_spaces();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  uint8_t add(const Term& term) {
    const auto same = [&](const Term& other) {
      return other.kind == term.kind && other.index == term.index && other.number == term.number &&
             other.function == term.function && std::equal(other.args, std::end(other.args), term.args);
    };
    const auto found = std::find_if(terms_.begin(), terms_.end(), same);
    const auto at = static_cast<uint8_t>(found - terms_.begin());
    if (found == terms_.end()) terms_.push_back(term);
    return at;
  }

  uint8_t read() {
    skip_spaces();
    const size_t begin = at_;
    if (at_ < text_.size() && (std::isdigit(static_cast<unsigned char>(text_[at_])) || text_[at_] == '-')) {
      Term term{.kind = Term::Kind::kNumber};
      const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), term.number);
      CHORALE_INVARIANT(error == std::errc(), "no number in '", text_, "' at ", at_);
      at_ = static_cast<size_t>(end - text_.data());
      return add(term);
    }
    while (at_ < text_.size() && is_word(text_[at_])) ++at_;
    const std::string_view word = text_.substr(begin, at_ - begin);
    CHORALE_INVARIANT(!word.empty(), "no word in '", text_, "' at ", at_);
    if (accept('(')) {
      Term call{.kind = Term::Kind::kCall, .function = word};
      do {
        CHORALE_INVARIANT(call.arg_count < std::size(call.args), word, " in '", text_, "' has too many arguments");
        const uint8_t arg = read();
        call.args[call.arg_count++] = arg;
      } while (accept(','));
      CHORALE_INVARIANT(accept(')'), "'", text_, "' lacks a ')' at ", at_);
      return add(call);
    }
    if (const auto input = std::find(inputs_.begin(), inputs_.end(), word); input != inputs_.end())
      return add({.kind = Term::Kind::kInput, .index = static_cast<uint8_t>(input - inputs_.begin())});
    CHORALE_INVARIANT(word.size() == 2 && word[0] == 'p' && word[1] >= '0' && word[1] <= '3', "'", word, "' in '",
                      text_, "' is neither an input nor a parameter");
    return add({.kind = Term::Kind::kParam, .index = static_cast<uint8_t>(word[1] - '0')});
  }

  std::string_view text_;
  std::vector<std::string_view> inputs_;
  size_t at_ = 0;
  std::vector<Term> terms_;
};

}  // namespace

const Expression& expression_of(ScalarOp op) {
  static const auto expressions = [] {
    std::array<Expression, kScalarOpCount> all;
    for (size_t i = 0; i < all.size(); ++i) all[i] = Reader(static_cast<ScalarOp>(i)).take();
    return all;
  }();
  return expressions[static_cast<size_t>(op)];
}

}  // namespace chorale::vec
