// Graphs whose sizes may change.
//
// Note [Symbols] Sizes are plain integers everywhere, also while a function is traced: eager code, rows and gradient
// rules know nothing of symbols. A graph with symbols is learnt from examples. The same function traced at several
// sizes gives graphs whose texts differ in numbers only (sizes, strides, attributes), and each number becomes an
// expression of the symbols that gives what was seen. A graph that is traced at other sizes is the same graph where
// every number is what its expression says there. What runs is always the graph that was traced at its own sizes: an
// expression that was learnt from too few examples costs a compilation and never gives a wrong value, and so does host
// code that branches on a size.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace chorale::graph {

// A number of a graph in terms of symbols: factor * s0^p0 * s1^p1 … / divisor, rounded down, + offset. A floating one
// has a floating factor, negative powers (an average is divided by its count) and no offset.
struct SizeExpr {
  bool is_floating = false;
  double real = 0;
  int64_t factor = 0, divisor = 1, offset = 0;
  std::vector<int> powers{};  // by symbol; empty: a constant

  bool is_constant() const { return powers.empty(); }
  int64_t integer_at(std::span<const int64_t> sizes) const;
  double real_at(std::span<const int64_t> sizes) const;
  std::string text(std::span<const std::string> symbols) const;
};

// The text of a graph with expressions for numbers:
//
//   graph[s0=30](%0: f32[s0, 512]) {
//     %1: f32[2*s0, 512] = cat(%0, %0)
//     return %1
//   }
//
// Symbols that it does not use are not named; the sizes are those that it was compiled at.
class SymbolicText {
 public:
  struct Example {
    std::vector<int64_t> sizes;  // by symbol
    std::string text;
  };
  // Learns from texts that print() gave. Returns nothing, and says why not, where they differ in more than numbers, or
  // where a number follows none of the known forms.
  static std::optional<SymbolicText> learn(std::span<const Example> examples, std::vector<std::string> names,
                                           std::string& why_not);
  // Reads what text() gave; throws InvalidArgument.
  static SymbolicText parse(const std::string& text);

  std::string text() const;
  // The text of the graph at these sizes, by symbol.
  std::string at(std::span<const int64_t> sizes) const;
  const std::vector<int64_t>& hints() const { return hints_; }
  // Whether an expression has the symbol.
  bool uses(size_t symbol) const;
  // Empty where `text` is this graph at these sizes; else the line that differs first.
  std::string mismatch(const std::string& text, std::span<const int64_t> sizes) const;

 private:
  std::vector<std::string> names_;
  std::vector<int64_t> hints_;
  std::vector<std::string> between_;  // the text before each number, and behind the last
  std::vector<SizeExpr> numbers_;
};

}  // namespace chorale::graph
