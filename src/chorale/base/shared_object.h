// Modules: parts of ours that use libraries which a machine may lack. Each is a shared object of its own, loaded at
// first use, so that one binary starts everywhere. A source called NAME_module.cc becomes chorale_NAME.so where CMake
// finds what it needs (cmake/third_party.cmake).
//
// A module sees of Chorale only a header that declares its interface, a class of pure virtual functions; it gives out
// one function, chorale_NAME_module_VERSION, that returns the object. It calls nothing of ours: it works for a program
// that has the library built in and for one that shares it. chorale_cuda.so is another kind: a part of the library that
// is left on disk until it is needed. It calls the rest of it, so only programs that share the library can load it.
// A module may also give out chorale_NAME_trouble, which returns what keeps it from working on this machine, or null.
#pragma once

#include <string>

#include "chorale/base/optional_parts.h"

namespace chorale {

struct SharedObject {
  const char* name;        // mpi
  int version;             // of the interface
  const char* to_build;    // "apt-get install libopenmpi-dev": what to do before building again
  const char* to_run;      // "apt-get install libopenmpi3"
  bool for_whole_process;  // its libraries load plugins that expect their symbols to be visible
};

// Whether it can be loaded. It is looked for in the folder CHORALE_MODULES if that is set; else beside the program and
// the library, and in lib/ and lib/chorale/ next to their folders.
Availability shared_object_availability(const SharedObject& module);
// What the module's function returns. Throws StateError, saying what to install, when there is no such module.
void* load_shared_object(const SharedObject& module);

inline constexpr SharedObject kMpiObject{"mpi", 1, "apt-get install libopenmpi-dev", "apt-get install libopenmpi3",
                                         true};
inline constexpr SharedObject kUcxObject{"ucx", 1, "apt-get install libucx-dev", "apt-get install libucx0", false};
inline constexpr SharedObject kCudaObject{
    "cuda", 1, "install NVIDIA's CUDA toolkit (version 12 or later), choose the preset cuda",
    "programs that use a GPU link the shared libchorale (the preset cuda does)", false};

}  // namespace chorale
