#include "chorale/base/optional_parts.h"

#include <dlfcn.h>

#include "chorale/base/error.h"
#include "chorale/base/shared_object.h"

namespace chorale {
namespace {

Availability nccl() {
  if (!shared_object_availability(kCudaObject).yes) return {false, "nothing uses it without CUDA"};
  return has_library("libnccl.so.2", "install NVIDIA's libnccl2");
}

constexpr OptionalPart kParts[] = {
    {"CUDA", "training on NVIDIA GPUs", [] { return shared_object_availability(kCudaObject); }},
    {"NCCL", "collectives between GPUs", nccl},
    {"UCX", "fast fabrics, unauthenticated", [] { return shared_object_availability(kUcxObject); }},
    {"MPI", "groups under mpirun and srun", [] { return shared_object_availability(kMpiObject); }},
};

}  // namespace

std::span<const OptionalPart> optional_parts() { return kParts; }

Availability has_library(const char* soname, std::string_view to_install) {
  // It stays: not every library can be unloaded without leaving something behind.
  if (void* library = dlopen(soname, RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE)) {
    dlclose(library);
    return {true, ""};
  }
  return {false, concat(soname, " not found; ", to_install)};
}

}  // namespace chorale
