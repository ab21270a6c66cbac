#include "chorale/transport/host_identity.h"

#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <fstream>

#include "chorale/base/error.h"

namespace chorale::transport {

std::string host_identity() {
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::string identity;
  std::getline(boot, identity);
  struct stat space {};
  CHORALE_CHECK_STATE(boot && stat("/proc/self/ns/net", &space) == 0,
                      "[host] cannot read the boot's id and the network namespace; is /proc mounted?");
  return concat(identity, "/", space.st_ino);
}

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = "";
  if (gethostname(name, sizeof name - 1) != 0) return "(unknown host)";
  return name;
}

}  // namespace chorale::transport
