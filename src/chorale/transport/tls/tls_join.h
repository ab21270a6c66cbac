// How the ranks of a job that are on different hosts get connected: each listens, and connects to those below it.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "chorale/transport/fabric/fabric.h"
#include "chorale/transport/security/refusals.h"
#include "chorale/transport/security/secret.h"
#include "chorale/transport/socket.h"
#include "chorale/transport/tls/tls_stream.h"

namespace chorale::transport {

class TlsJoin {
 public:
  // Listens at the address from now on. Throws InvalidArgument without a secret.
  TlsJoin(const FabricOptions& options, const std::string& own_address);
  ~TlsJoin();

  // What FabricAddress::endpoint is to say: where it listens, and its token, which names its process.
  const std::string& endpoint() const { return endpoint_; }
  // Connects to every rank of another host, `streams` times each, and ends listening. Strangers are refused, logged and
  // delay nobody. Throws CommError that names the ranks that are missing at the deadline, or do not know the secret.
  std::map<int, std::vector<TlsStream>> meet(const std::vector<FabricAddress>& addresses, int streams,
                                             Deadline deadline);

 private:
  struct Visitor;

  void visit(int peer, int stream, int attempt, Deadline deadline);
  void check_over() const;
  void welcome(Deadline deadline);
  // False when the handshake has ended, one way or the other.
  bool go_on(Visitor& visitor, Deadline deadline);
  bool expects(const StreamIdentity& identity) const;
  std::string missing() const;

  const int rank_;
  const Secret secret_;
  const std::string congestion_;
  const std::function<bool()> is_over_;
  const std::string token_;
  Socket listener_;
  const std::string endpoint_;
  Refusals refusals_;
  std::vector<FabricAddress> addresses_;
  std::vector<std::string> tokens_;  // of those on other hosts
  int streams_ = 0;
  size_t left_ = 0;                              // streams to come
  std::list<Visitor> visitors_;                  // in the middle of their handshake, the oldest first
  std::map<int, std::map<int, TlsStream>> met_;  // by peer and stream
};

}  // namespace chorale::transport
