// Modules: parts of ours that use libraries which a machine may lack. Each is a shared object of its own, loaded at
// first use, so that one binary starts everywhere. A source called NAME_module.cc becomes chorale_NAME.so where CMake
// finds what it needs (cmake/third_party.cmake).
//
// A module sees of Chorale only a header that declares its interface, a class of pure virtual functions; it gives out
// one function, chorale_NAME_module_VERSION, that returns the object. It calls nothing of ours: it works for a program
// that has the library built in and for one that shares it.
#pragma once

#include <string>

#include "chorale/base/optional_parts.h"

namespace chorale {

struct SharedObject {
  const char* name;        // mpi
  int version;             // of the interface
  const char* to_build;    // "libopenmpi-dev": the package that the build needs
  const char* to_run;      // "libopenmpi3"
  bool for_whole_process;  // its libraries load plugins that expect their symbols to be visible
};

// Whether it can be loaded. It is looked for in the folder CHORALE_MODULES if that is set; else beside the program and
// the library, and in lib/ and lib/chorale/ next to their folders.
Availability shared_object_availability(const SharedObject& module);
// What the module's function returns. Throws StateError, saying what to install, when there is no such module.
void* load_shared_object(const SharedObject& module);

inline constexpr SharedObject kMpiObject{"mpi", 1, "libopenmpi-dev", "libopenmpi3", true};
inline constexpr SharedObject kUcxObject{"ucx", 1, "libucx-dev", "libucx0", false};

}  // namespace chorale
