// How the launchers of an elastic job on several nodes find each other (launch/council.h), at its start and later.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "chorale/launch/council.h"
#include "chorale/launch/nodes.h"
#include "chorale/transport/security/secret.h"
#include "chorale/transport/socket.h"

namespace chorale::launch {

struct Gathering {
  transport::EpochNode node;  // this one
  transport::Epoch first;     // the first, or the last that a node that joins has heard of
  int first_member = 0;       // of this node
  // Numbers that no other node gives to its newcomers.
  int newcomers_from() const { return kMostNewcomers * (node.number + 1); }
  static constexpr int kMostNewcomers = 100'000;
};

// Called at the start: each node tells the others, through the store of node 0, where its own is. `job`: what all nodes
// agree on.
Gathering gather(transport::Store& meeting, int node, int nodes, const NodePlan& job, const std::string& place,
                 Deadline deadline);
// Later: `any` is the place of a launcher's store. The node gets a number from the one that has the job's store.
Gathering join_job(const transport::Endpoint& any, const transport::Secret& secret, const std::string& place,
                   Deadline deadline);

struct CouncilSeat {
  transport::Endpoint own;  // this launcher's store
  transport::Secret secret;
  std::chrono::milliseconds keep_alive;
  Successor::Plan successor;
};
std::shared_ptr<Council> make_council(const Gathering& gathering, const CouncilSeat& seat);
// The entries of an elastic job in a launcher's store. Throws CommError.
std::shared_ptr<transport::Store> elastic_store(const transport::Endpoint& place, const transport::Secret& secret,
                                                Deadline deadline);

}  // namespace chorale::launch
