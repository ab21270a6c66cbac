// Every call that a group offers, with data whose result is known, as it should be made or with something wrong in it.
#pragma once

#include <span>
#include <stdexcept>

#include "chorale/comm/group.h"

namespace chorale::faults {

enum class Wrong { kNothing, kShape, kDtype, kReduction, kRoot };

struct CallArgs {
  comm::Group& group;
  int64_t count = 0;  // elements of a chunk
  int root = 0;       // global rank
  DType dtype = DType::kF32;
  Reduce reduce = Reduce::kSum;
};

struct CallRow {
  const char* name;
  bool has_data, reduces, has_root;  // what can be wrong with it
  bool pairwise;                     // its sizes are a matter between two ranks: either may be the wrong one
  void (*run)(const CallArgs& args);
};
std::span<const CallRow> call_rows();
const CallRow& call_row(std::string_view name);

struct WrongResult : std::logic_error {
  using std::logic_error::logic_error;
};
// Waits for the call, and throws WrongResult if it says that all is well and the result is not what it must be.
void make_call(const CallRow& row, comm::Group& group, int64_t count, int root, Wrong wrong = Wrong::kNothing);

}  // namespace chorale::faults
