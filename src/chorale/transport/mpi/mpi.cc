#include "chorale/transport/mpi/mpi.h"

#include "chorale/base/config.h"
#include "chorale/base/shared_object.h"

namespace chorale::transport {

Mpi& Mpi::get() {
  static auto* const mpi = [] {
    auto* loaded = static_cast<Mpi*>(load_shared_object(kMpiObject));
    loaded->initialize();
    return loaded;
  }();
  return *mpi;
}

bool Mpi::started_by_mpi() { return config::env("OMPI_COMM_WORLD_SIZE") || config::env("PMIX_RANK"); }

}  // namespace chorale::transport
