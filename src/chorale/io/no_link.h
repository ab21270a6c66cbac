// Names that are written to must not be links.
#pragma once

#include <filesystem>

namespace chorale::io {

// InvalidArgument, naming the path and where it leads, when it is a symbolic link: what is written by its name would
// change a file that nobody has named.
void check_is_no_link(const std::filesystem::path& path);

}  // namespace chorale::io
