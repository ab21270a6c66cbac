#include "chorale/base/exit_status.h"

#include <cstdlib>

namespace chorale {
namespace {

// The handlers that are still to be called are called by the inner exit, with its status (glibc says so; POSIX leaves
// it open).
void exit_with_failure(int status, void*) {
  if (status == 0) std::exit(1);
}

}  // namespace

void end_with_failure() { [[maybe_unused]] static const int registered = on_exit(exit_with_failure, nullptr); }

}  // namespace chorale
