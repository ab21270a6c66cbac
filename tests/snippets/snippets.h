// What the generated code of tests/snippets/extract.py is made of.
#pragma once

#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "chorale/chorale.h"

// What <!-- check --> blocks use: the reader of a page does not see it.
#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) throw std::logic_error(std::string("not true: ") + #condition); \
  } while (false)

namespace snippets {

struct Snippet {
  const char* where;                         // docs/usage/tensors.md:12
  void (*run)(chorale::comm::Group& group);  // of the two ranks that run all of this
  const char* output;                        // what it prints, or null
  const char* error;                         // what the exception that it throws says, or null
};

std::vector<Snippet>& all();
inline int add(const Snippet& snippet) {
  all().push_back(snippet);
  return 0;
}

}  // namespace snippets
