#include "chorale/launch/gathering.h"

#include <sstream>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/transport/store/prefix_store.h"
#include "chorale/transport/store/tcp_store.h"

namespace chorale::launch {

using namespace std::chrono_literals;
using transport::Endpoint;

// Between nodes a job is never started again as a whole.
std::shared_ptr<transport::Store> elastic_store(const Endpoint& place, const transport::Secret& secret,
                                                Deadline deadline) {
  return std::make_shared<transport::PrefixStore>(transport::elastic_prefix(0),
                                                  std::make_shared<transport::TcpStore>(place, secret, deadline));
}

Gathering gather(transport::Store& meeting, int node, int nodes, const NodePlan& job, const std::string& place,
                 Deadline deadline) {
  const auto key = [](int number) { return concat("place of node/", number); };
  meeting.set(key(node), concat(place, " ", job.first_rank), deadline);
  Gathering gathering;
  gathering.first.number = 1;
  gathering.first.cause = "start";
  gathering.first.founders = job.world_size;
  gathering.first_member = job.first_rank;
  for (int member = 0; member < job.world_size; ++member) gathering.first.members.push_back(member);
  for (int number = 0; number < nodes; ++number) {
    transport::EpochNode other{number, {}};
    std::istringstream(meeting.get(key(number), deadline)) >> other.place;
    if (number == node) gathering.node = other;
    gathering.first.nodes.push_back(other);
  }
  return gathering;
}

Gathering join_job(const Endpoint& any, const transport::Secret& secret, const std::string& place, Deadline deadline) {
  const auto last_epoch = [&](const Endpoint& at) {
    try {
      return transport::Epoch::parse(elastic_store(at, secret, deadline)->get(kEpochOfNode, deadline));
    } catch (const CommError& error) {
      throw CommError(concat("[launch] --join ", at.text(),
                             ": no launcher of an elastic job on several nodes answers there: ", error.what()));
    }
  };
  Gathering gathering;
  gathering.first = last_epoch(any);
  const Endpoint keeper = Endpoint::parse(gathering.first.nodes.front().place);
  gathering.first = last_epoch(keeper);
  const auto number = elastic_store(keeper, secret, deadline)->add(kHighestNode, 1, deadline);
  gathering.node = {static_cast<int>(number), place};
  return gathering;
}

std::shared_ptr<Council> make_council(const Gathering& gathering, const CouncilSeat& seat) {
  return std::make_shared<Council>(Council::Plan{
      .node = gathering.node.number,
      .epoch = gathering.first,
      .own = elastic_store(seat.own, seat.secret, within(30s)),
      .connect = [secret = seat.secret](
                     const std::string& place,
                     Deadline deadline) { return elastic_store(Endpoint::parse(place), secret, deadline); },
      .will =
          [secret = seat.secret](const std::string& place, const std::string& key) {
            return std::make_shared<transport::StoreWill>(
                Endpoint::parse(place), secret, concat(transport::elastic_prefix(0), "/", key), "", within(1s));
          },
      .keep_alive = seat.keep_alive,
      .successor = seat.successor});
}

}  // namespace chorale::launch
