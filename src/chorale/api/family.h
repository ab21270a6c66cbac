// A compiled stretch and the sizes that it holds for (Note [Symbols] in graph/symbolic.h).
//
// The first size that is seen is compiled as it is. The second is compiled again, and what differs between the two
// becomes symbols; further sizes take the programs of the second. Sizes 0 and 1 stay what they are: they broadcast, or
// there is nothing to do. Sizes that changed together share a symbol; each that the user marked has its own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "chorale/api/segment.h"
#include "chorale/graph/symbolic.h"

namespace chorale::compiled {

// Whether the user said that a number changes: then it is a symbol from the start, together with others that have the
// same value, or its own.
enum class Mark : uint8_t { kNone, kShared, kOwn };

// A number that comes from outside: a dimension of a tensor, or an integer argument.
struct SizeSource {
  std::string name;  // "arg 0.size(1)", "arg 1", "input 3.size(0)"
  int64_t value = 0;
  Mark mark = Mark::kNone;
  size_t argument = SIZE_MAX;  // of a dimension of an argument: which, and
  int64_t dim = 0;
  bool is_late = false;  // only running tells (Note [Late sizes]); the value is a stand-in
};

class Family {
 public:
  // What was seen: numbers from outside, and the graphs that were traced.
  struct Example {
    std::vector<SizeSource> sources;
    std::vector<std::string> texts;
  };
  // One size, but for what is marked.
  Family(size_t ordinal, std::shared_ptr<const Segment> segment, Example example);
  // `segment` was compiled at a size that `before` does not hold for. Where the graphs differ in numbers only, the new
  // one holds for both and for others like them; else for its own, and why_fixed() says so.
  Family(const Family& before, std::shared_ptr<const Segment> segment, Example example);

  size_t ordinal() const { return ordinal_; }
  const std::shared_ptr<const Segment>& segment() const { return segment_; }
  bool is_dynamic() const { return !symbols_.empty(); }
  // Whether what follows from its symbols is known.
  bool is_learnt() const { return !texts_.empty(); }
  const std::string& why_fixed() const { return why_fixed_; }
  // Whether other sizes of the same graph might be joined with it.
  bool is_comparable(const Example& example) const;
  // Empty where the example is this graph at sizes that it holds for; else what differs first. `is_own`: that is no
  // plain number from outside, but something that only the symbols tell. May learn.
  std::string mismatch(const Example& example, bool& is_own);
  // Learns from sizes that do not run. Empty, or why nothing could be learnt.
  std::string teach(const std::vector<Example>& examples);
  // The numbers that each symbol stands for.
  std::vector<std::vector<SizeSource>> symbols() const;
  // A number that turned out to be fixed, though it was marked, is no symbol any more.
  void fix(const std::string& source);
  // The text of each graph, with symbols once they are known.
  std::vector<std::string> texts() const;
  const std::vector<graph::SymbolicText>& symbolic_texts() const { return texts_; }
  // "arg 0.size(0) = s0, at least 2"
  std::vector<std::string> guards() const;

 private:
  // Values of symbols; empty, with a reason, where the example is outside of what they may be.
  std::vector<int64_t> sizes_of(const Example& example, std::string& why_not, bool& is_own) const;
  // Whether a symbol has a value that none of the examples has, which all have the same.
  bool is_first_change(const std::vector<int64_t>& sizes) const;
  bool learn(std::string& why_not);
  void find_symbols();
  std::vector<std::string> names() const;

  size_t ordinal_;
  std::shared_ptr<const Segment> segment_;
  std::vector<Example> examples_;
  std::vector<std::vector<size_t>> symbols_;  // the sources of each
  std::vector<graph::SymbolicText> texts_;    // empty until they are known
  std::string why_fixed_;
};

}  // namespace chorale::compiled
