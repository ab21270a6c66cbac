#include "chorale/comm/group_state.h"

#include "chorale/base/error.h"

namespace chorale::comm {

int GroupState::group_rank(const char* call, int global_rank) const {
  const int found = membership().find(global_rank);
  CHORALE_CHECK(found >= 0, "[", call, "] rank ", global_rank, " is not in group ", membership().name, " of ", size(),
                " ranks; ranks are global ones");
  return found;
}

}  // namespace chorale::comm
