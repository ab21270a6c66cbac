// How a user names what connects the ranks: `chorale run --fabric F`, CHORALE_FABRIC, or an option of a group.
//
//   tls           TLS 1.3 between hosts, shared memory inside; the default
//   ucx[:DEVICE]  UCX between hosts (RDMA, TCP, ...) over a network that is trusted; DEVICE as in UCX_NET_DEVICES
//   mpi           MPI's own collectives, everywhere, in a job that mpirun has started
#pragma once

#include <string>
#include <string_view>

namespace chorale::transport {

struct FabricName {
  std::string kind = "tls";
  std::string device;  // of ucx; empty: all
  friend bool operator==(const FabricName&, const FabricName&) = default;
};
// Throws InvalidArgument, saying which there are.
FabricName parse_fabric(std::string_view text);
// The one that is named, if it is not empty; else CHORALE_FABRIC; else tls.
FabricName choose_fabric(std::string_view text);

}  // namespace chorale::transport
