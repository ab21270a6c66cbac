// The default group of a rank, and what else belongs to a job. One object per rank; nothing is process-wide.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include "chorale/comm/group.h"
#include "chorale/transport/store/rendezvous.h"

namespace chorale::comm {

class World {
 public:
  World() = default;
  World(World&&) = default;
  World& operator=(World&&) = delete;
  // Does what destroy() does, unless an exception passes through. What destroy() would throw is written to standard
  // error, and the process ends with status 1 where it would have ended with 0.
  ~World();
  // Calls init().
  World(std::shared_ptr<transport::Store> store, int rank, int size, const GroupOptions& options = {}) {
    init(std::move(store), rank, size, options);
  }

  // Makes the default group with the ranks that meet at the store. StateError when there is one already.
  void init(std::shared_ptr<transport::Store> store, int rank, int size, const GroupOptions& options = {});
  // Makes it with the ranks that a launcher started, or that an URL names (transport/store/rendezvous.h).
  void init(std::string_view url = "env://", const transport::RendezvousOptions& where = {},
            const GroupOptions& options = {});
  bool is_initialized() const { return store_ != nullptr; }
  // The default group; StateError before init() and after destroy().
  Group& group();
  // Leaves the default group and its store, together with the others (comm/leaving.h); init() may follow, with the same
  // store or URL too, and as often as one likes. Groups made from it live on. Throws CommError when another rank goes
  // on with a call that this one has left out.
  void destroy();

  // StateError before init() and after destroy().
  transport::Store& store();

 private:
  const int exceptions_at_birth_ = std::uncaught_exceptions();
  std::shared_ptr<transport::Store> store_;
  Group group_;
};

// The canonical, lower-case name of a way to move data ("shm", "tls", "ucx", "mpi", "nccl"), from any case. Throws
// InvalidArgument for a name that is none.
std::string parse_backend(std::string_view name);

// The variables that matter to data-parallel training, one line `env:NAME=value` each; N/A when a variable is not set.
std::string relevant_environment();

}  // namespace chorale::comm
