#include "chorale/device/cuda/libraries.h"

#include <dlfcn.h>

#include <filesystem>
#include <sstream>

#include "chorale/base/config.h"
#include "chorale/base/error.h"

namespace chorale::cuda {
namespace {

namespace fs = std::filesystem;

// FOLDER/lib/python3.x/site-packages/nvidia/PACKAGE/lib, for the folder of an installation of Python.
void add_python_folders(const fs::path& prefix, std::vector<std::string>& found) {
  std::error_code ignored;
  for (const auto& python : fs::directory_iterator(prefix / "lib", ignored)) {
    if (python.path().filename().string().rfind("python3", 0) != 0) continue;
    for (const char* packages : {"site-packages", "dist-packages"}) {
      for (const auto& package : fs::directory_iterator(python.path() / packages / "nvidia", ignored)) {
        if (fs::is_directory(package.path() / "lib", ignored)) found.push_back((package.path() / "lib").string());
      }
    }
  }
}

}  // namespace

std::vector<std::string> library_folders() {
  std::vector<std::string> found;
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const auto folder = config::env(variable)) found.push_back(*folder + "/lib64");
  }
  found.emplace_back("/usr/local/cuda/lib64");
  if (const auto environment = config::env("VIRTUAL_ENV")) add_python_folders(*environment, found);
  std::istringstream path(config::env("PATH").value_or(""));
  for (std::string folder; std::getline(path, folder, ':');) {
    std::error_code ignored;
    if (fs::exists(fs::path(folder) / "python3", ignored)) add_python_folders(fs::path(folder).parent_path(), found);
  }
  return found;
}

void* open_library(const std::vector<std::string>& names, const char* to_install) {
  constexpr int kFlags = RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE;
  for (const std::string& name : names) {
    if (void* const library = dlopen(name.c_str(), kFlags)) return library;
  }
  const std::vector<std::string> folders = library_folders();
  for (const std::string& folder : folders) {
    for (const std::string& name : names) {
      if (void* const library = dlopen((fs::path(folder) / name).c_str(), kFlags)) return library;
    }
  }
  std::string looked;
  for (const std::string& folder : folders) {
    looked += ", ";
    looked += folder;
  }
  throw StateError(concat("[cuda] ", names.front(), " not found in the linker's folders", looked, "; ", to_install));
}

void* find_function(void* library, const char* name) {
  void* const function = dlsym(library, name);
  CHORALE_CHECK_STATE(function, "[cuda] a library of NVIDIA's has no function ", name,
                      ": it belongs to another version");
  return function;
}

}  // namespace chorale::cuda
