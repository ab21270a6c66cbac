#include "chorale/base/descriptors.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace chorale {

int above_standard(int descriptor) {
  if (descriptor < 0 || descriptor > STDERR_FILENO) return descriptor;
  const int moved = fcntl(descriptor, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error = errno;
  close(descriptor);
  errno = error;
  return moved;
}

namespace {
// Opens the standard descriptors that are closed, and returns them. The system gives out the lowest free number first,
// so they fill up in order.
std::vector<int> fill_standard(int flags) {
  std::vector<int> opened;
  for (int number = STDIN_FILENO; number <= STDERR_FILENO; ++number) {
    if (fcntl(number, F_GETFD) >= 0) continue;
    const int found = open("/dev/null", O_RDWR | flags);
    if (found == number) {
      opened.push_back(number);
    } else if (found >= 0) {  // another thread was faster
      close(found);
    }
  }
  return opened;
}
}  // namespace

void open_standard_descriptors() { fill_standard(0); }

StandardDescriptorsHeld::StandardDescriptorsHeld() : held_(fill_standard(O_CLOEXEC)) {}

StandardDescriptorsHeld::~StandardDescriptorsHeld() {
  for (const int number : held_) close(number);
}

}  // namespace chorale
