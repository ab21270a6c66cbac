// The client of a StoreServer, over TCP or a Unix socket.
#pragma once

#include <mutex>
#include <optional>
#include <vector>

#include "chorale/base/forks.h"
#include "chorale/transport/fabric/control_channel.h"
#include "chorale/transport/store/store.h"
#include "chorale/transport/store/store_protocol.h"

namespace chorale::transport {

// The server sets `key` to `value` when this object goes, or its process, or the connection: a life that others can see
// the end of.
class StoreWill {
 public:
  StoreWill(const Endpoint& server, const std::optional<Secret>& secret, const std::string& key,
            const std::string& value, Deadline deadline);

 private:
  ControlChannel channel_;
};

// A call has a connection for itself, so that a wait of one thread holds up no other; connections are kept for later
// calls. A call that failed in the middle (a deadline, a lost server) may or may not have been carried out.
class TcpStore final : public Store {
 public:
  // Connects until the deadline: the server may start later than its clients.
  TcpStore(Endpoint server, std::optional<Secret> secret, Deadline deadline);

  void set(std::string_view key, std::string_view value, Deadline deadline) override;
  std::string get(std::string_view key, Deadline deadline) override;
  void wait(std::span<const std::string> keys, Deadline deadline) override;
  bool contains(std::string_view key, Deadline deadline) override;
  int64_t add(std::string_view key, int64_t delta, Deadline deadline) override;
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override;
  bool remove(std::string_view key, Deadline deadline) override;
  std::vector<std::string> keys(std::string_view prefix, Deadline deadline) override;
  int64_t count(Deadline deadline) override;

 private:
  StoreReply call(std::string_view name, const StoreRequest& request, Deadline deadline);
  ControlChannel take_channel(Deadline deadline);

  const Endpoint server_;
  const std::optional<Secret> secret_;
  std::mutex mutex_;
  std::vector<ControlChannel> idle_;
  std::string id_;  // of the server: a later one at the same place is another store
  const base::ForkMark made_;
};

}  // namespace chorale::transport
