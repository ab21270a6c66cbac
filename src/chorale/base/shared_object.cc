#include "chorale/base/shared_object.h"

#include <dlfcn.h>

#include <filesystem>
#include <vector>

#include "chorale/base/config.h"
#include "chorale/base/error.h"

namespace chorale {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> folders() {
  if (const auto named = config::env("CHORALE_MODULES")) return {*named};
  std::vector<fs::path> found;
  const auto add_around = [&](const fs::path& file) {
    const fs::path folder = file.parent_path();
    for (const fs::path& one :
         {folder, folder / "chorale", folder.parent_path() / "lib", folder.parent_path() / "lib/chorale"})
      found.push_back(one);
  };
  std::error_code ignored;
  add_around(fs::read_symlink("/proc/self/exe", ignored));
  Dl_info library;
  if (dladdr(reinterpret_cast<const void*>(&load_shared_object), &library) != 0 && library.dli_fname)
    add_around(fs::absolute(library.dli_fname, ignored));
  return found;
}

struct Loaded {
  void* (*function)() = nullptr;
  std::string reason;  // when it is null
  void* library = nullptr;
};

Loaded open(const SharedObject& module) {
  const std::string file = concat("chorale_", module.name, ".so");
  for (const fs::path& folder : folders()) {
    std::error_code ignored;
    if (!fs::exists(folder / file, ignored)) continue;
    // It stays: MPI and UCX leave threads and handlers behind.
    void* library = dlopen((folder / file).c_str(),
                           RTLD_LAZY | RTLD_NODELETE | (module.for_whole_process ? RTLD_GLOBAL : RTLD_LOCAL));
    if (!library) return {nullptr, concat(dlerror(), "; ", module.to_run)};
    const std::string name = concat("chorale_", module.name, "_module_", module.version);
    auto* function = reinterpret_cast<void* (*)()>(dlsym(library, name.c_str()));
    if (!function)
      return {nullptr, concat((folder / file).string(), " belongs to another version; build or install again")};
    return {function, "", library};
  }
  return {nullptr, concat(file, " was not built; ", module.to_build, " and build again")};
}

}  // namespace

Availability shared_object_availability(const SharedObject& module) {
  const Loaded loaded = open(module);
  if (!loaded.function) return {false, loaded.reason};
  const auto trouble =
      reinterpret_cast<const char* (*)()>(dlsym(loaded.library, concat("chorale_", module.name, "_trouble").c_str()));
  const char* const reason = trouble ? trouble() : nullptr;
  return {!reason, reason ? reason : ""};
}

void* load_shared_object(const SharedObject& module) {
  const Loaded loaded = open(module);
  CHORALE_CHECK_STATE(loaded.function, "[", module.name, "] ", loaded.reason);
  return loaded.function();
}

}  // namespace chorale
