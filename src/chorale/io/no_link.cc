#include "chorale/io/no_link.h"

#include <system_error>

#include "chorale/base/error.h"

namespace chorale::io {

void check_is_no_link(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_symlink(std::filesystem::symlink_status(path, error))) return;
  const std::filesystem::path target = std::filesystem::read_symlink(path, error);
  throw InvalidArgument(concat("cannot write ", path, ": it is a symbolic link to ", target,
                               "; nothing was changed. Remove the link, or name the file itself"));
}

}  // namespace chorale::io
