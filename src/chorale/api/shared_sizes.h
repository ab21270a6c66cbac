// What ranks that compile together have seen of their arguments, so that all of them make the same sizes symbols.
//
// Note [Shared sizes] Each time they compile, ranks tell each other the sizes and integers that they were called with.
// What differs, now or from what was seen before, is a symbol on every rank from then on, so that all compile equally
// often: a rank that sees batches of 5 would else compile again where its neighbour, which saw two sizes, does not.
// Ranks meet by compilation, not by call: one that compiles waits until the others do. Where the function itself talks
// to other ranks, guards must be agreed on, too (CompileOptions::agree_on_guards), or the ranks would wait for each
// other in different places.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "chorale/api/family.h"
#include "chorale/comm/group.h"

namespace chorale::compiled {

struct Argument;

class SeenSizes {
 public:
  // Every rank calls it with its arguments.
  void share(const comm::Group& group, const std::vector<Argument>& arguments);
  // Marks the sources that are symbols.
  void mark(std::vector<SizeSource>& sources) const;

  // One line for each argument, and what a rank told in this way. Public for tests.
  static std::string text_of(const std::vector<Argument>& arguments);
  void merge(const std::string& text);

 private:
  // A number that was always the same, or has had several values.
  using Atom = std::optional<int64_t>;
  struct Entry {
    Atom number;                             // of an integer; of a tensor none
    std::optional<std::vector<Atom>> sizes;  // of a tensor; of an integer, or where numbers of dimensions differ, none
  };
  std::map<std::string, Entry> seen_;  // by argument
};

}  // namespace chorale::compiled
