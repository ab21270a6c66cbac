// NVIDIA's libraries, opened when they are first needed: those of the system, of the toolkit, or those that Python's
// packages nvidia-* brought.
#pragma once

#include <string>
#include <vector>

namespace chorale::cuda {

// The first of these names that opens, as a handle for dlsym. Throws StateError that says where it was looked for and
// what to install.
void* open_library(const std::vector<std::string>& names, const char* to_install);
// The function, or StateError.
void* find_function(void* library, const char* name);
// The folders beside the linker's own.
std::vector<std::string> library_folders();

}  // namespace chorale::cuda
