#include "chorale/comm/comm_counter.h"

#include <ostream>

namespace chorale::comm {

constinit thread_local CommCounter* CommCounter::innermost_ = nullptr;

namespace {
bool is_counted(CallKind kind) { return kind >= CallKind::kBroadcast && kind <= CallKind::kAllToAll; }
}  // namespace

CommCounter::CommCounter() : outer_(innermost_) { innermost_ = this; }
CommCounter::~CommCounter() { innermost_ = outer_; }

void CommCounter::note(CallKind kind, size_t bytes) {
  for (CommCounter* scope = innermost_; scope; scope = scope->outer_) {
    ++scope->counts_[static_cast<size_t>(kind)];
    if (is_counted(kind)) scope->bytes_ += static_cast<int64_t>(bytes);
  }
}

int64_t CommCounter::total() const {
  int64_t sum = 0;
  for (size_t kind = 0; kind < kCallKinds; ++kind) {
    if (is_counted(static_cast<CallKind>(kind))) sum += counts_[kind];
  }
  return sum;
}

std::ostream& operator<<(std::ostream& out, const CommCounter& counter) {
  bool any = false;
  for (size_t kind = 0; kind < kCallKinds; ++kind) {
    const auto which = static_cast<CallKind>(kind);
    if (!is_counted(which) || counter.count(which) == 0) continue;
    out << (any ? ", " : "") << counter.count(which) << " " << name_of(which);
    any = true;
  }
  return any ? out : out << "nothing";
}

}  // namespace chorale::comm
