// Compiled kernels on disk: one file each, in a folder that only its owner can enter.
#pragma once

#include <string>
#include <vector>

namespace chorale::cuda {

struct CompiledKernel {
  std::string name;  // in the binary
  std::vector<char> binary;
};

// The folder: CHORALE_CACHE_DIR, else XDG_CACHE_HOME/chorale, else ~/.cache/chorale, and cuda below it; empty where
// there is none that is ours alone.
std::string kernel_cache_folder();
// `identity` is everything the binary depends on; a file holds it whole and is read only for the same.
bool find_in_cache(const std::string& identity, CompiledKernel& found);
// A cache that cannot be written is no error: the kernel is compiled again next time.
void put_into_cache(const std::string& identity, const CompiledKernel& kernel);

}  // namespace chorale::cuda
