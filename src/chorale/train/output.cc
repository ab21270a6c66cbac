#include "chorale/train/output.h"

#include <cerrno>
#include <cstring>

#include "chorale/base/error.h"
#include "chorale/base/log.h"

namespace chorale::train {

void Output::print(std::string_view text) {
  errno = 0;
  const bool written = std::fwrite(text.data(), 1, text.size(), file_) == text.size();
  if (std::fflush(file_) == 0 && written) return;
  const int error = errno;
  std::clearerr(file_);
  CHORALE_CHECK_STATE(error != EPIPE, "nobody reads the output any more");
  if (!failed_)
    log_warning(concat("the output cannot be written: ", std::strerror(error), "; the work goes on without it"));
  failed_ = true;
}

}  // namespace chorale::train
