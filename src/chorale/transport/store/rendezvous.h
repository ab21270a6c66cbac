// How the ranks of a job find each other: own rank, number of ranks, and a store that all of them reach.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "chorale/transport/security/secret.h"
#include "chorale/transport/store/store.h"

namespace chorale::transport {

struct RendezvousOptions {
  // Win over variables; must not be in the URL as well.
  std::optional<int> rank = {}, world_size = {};
  // The job's secret; otherwise it comes from the environment (transport/security/secret.h).
  std::optional<Secret> secret = {};
  // How long the others may take to appear. The default is default_timeout().
  std::optional<std::chrono::milliseconds> timeout = {};
};
// CHORALE_TIMEOUT in seconds, else 30 minutes.
std::chrono::milliseconds default_timeout();

struct RendezvousResult {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  // among the ranks of this host
  int local_size = 1;
  std::shared_ptr<Store> store;  // empty but for entries below "rendezvous/"
  std::optional<Secret> secret;
  // The address at which the ranks of other hosts reach this one; loopback when there are no others.
  std::string address;
};

// `url` is one of
//   env://                 rank, size and the store's place from variables: torchrun's RANK, WORLD_SIZE, MASTER_ADDR,
//                          MASTER_PORT, or those of another launcher (transport/launcher_variables.h). A missing one is
//                          an InvalidArgument that names it; where none at all is set, this process is a world of one,
//                          and a line in the log says so. Under `chorale run` the launcher hosts the store.
//   tcp://HOST:PORT        rank 0 hosts the store there
//   file:///PATH           a file that all reach; it is removed when the last rank drops its store
// Returns when all ranks are there. They may meet at the same place again and again, and a process that has a rank's
// environment may join a second world beside the first: each meeting has entries of its own (Note [Meetings]).
// The last two take rank and size from the options, from `?rank=0&world_size=2`, or from a launcher's variables.
//
// Under mpirun on several hosts, without a secret and without MASTER_ADDR, rank 0 makes a secret and a store, and MPI
// tells the others, where the module for MPI is available.
//
// Otherwise, without a secret the job must be on one host, and its store is a Unix socket for this user only, named
// after the port. Rank 0 drops its store last: when it goes it waits a few seconds for the others to leave. Ranks that
// do not fit together (two sizes, one rank twice, two runs of a launcher) get an InvalidArgument that names them.
RendezvousResult rendezvous(std::string_view url = "env://", const RendezvousOptions& options = {});

}  // namespace chorale::transport
