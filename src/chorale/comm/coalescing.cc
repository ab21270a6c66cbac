#include "chorale/comm/coalescing.h"

#include <exception>

#include "chorale/base/error.h"
#include "chorale/comm/call_builder.h"

namespace chorale::comm {

Coalescing::Coalescing(const Group& group) : state_(group.state_), exceptions_(std::uncaught_exceptions()) {
  if (!group.is_member()) return;
  CHORALE_CHECK_STATE(!state_->collecting, "[coalescing] a scope is open in this group already");
  state_->collecting = &collected_;
}

Coalescing::~Coalescing() noexcept(false) {
  if (ended_) return;
  if (std::uncaught_exceptions() > exceptions_) {
    if (state_) state_->collecting = nullptr;
    return;
  }
  end().wait();
}

Work Coalescing::end() {
  CHORALE_CHECK_STATE(!ended_, "[coalescing] the scope has ended already");
  ended_ = true;
  if (!state_) return {};
  state_->collecting = nullptr;
  start_together(*state_, collected_);
  return Work(state_->engine, collected_);
}

}  // namespace chorale::comm
