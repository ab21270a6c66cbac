// What the fabrics have in common: lives, notices and events, which are the control mesh's, and the table of messages.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "chorale/base/crc32c.h"
#include "chorale/transport/fabric/control_mesh.h"
#include "chorale/transport/fabric/fabric.h"
#include "chorale/transport/fabric/message.h"

namespace chorale::transport {

class MeshFabric : public Fabric, protected ControlMesh::Owner {
 public:
  void tell(std::span<const int> peers, std::string_view notice) final { mesh_.tell(peers, notice); }
  void on_notice(std::function<void(int, std::string_view)> hear) final { mesh_.on_notice(std::move(hear)); }
  void set_status(const std::array<uint64_t, 8>& status) final { mesh_.set_status(status); }
  Life life(int peer) const final { return mesh_.life(peer); }
  uint32_t events() const final { return mesh_.events().now(); }
  void await_event(uint32_t seen, Deadline deadline) override { mesh_.events().wait(seen, deadline); }
  void wake() final { mesh_.events().add(); }

 protected:
  // The fabric starts the mesh when it is whole, and leaves it before it goes.
  MeshFabric(const FabricOptions& options, std::map<int, TlsStream> control)
      : options_(options), mesh_(std::move(control), options.keep_alive, *this) {}

  // Called under mutex_.
  std::optional<Found> find_message(int peer, uint64_t channel) {
    const MessagePtr message = table_.find(peer, channel);
    if (!message) return std::nullopt;
    return Found{message->source, message->envelope, message->bytes};
  }

  void add_checksum(Frame& frame, std::span<const std::byte> body) const {
    if (!options_.checksum) return;
    frame.has_checksum = 1;
    frame.checksum = crc32c(body);
  }

  static FabricTransferPtr sending(int peer) {
    const auto transfer = std::make_shared<FabricTransfer>();
    transfer->is_send = true;
    transfer->peer = peer;
    return transfer;
  }
  static FabricTransferPtr receiving(int peer, uint64_t channel, std::span<std::byte> into) {
    const auto transfer = std::make_shared<FabricTransfer>();
    transfer->peer = peer;
    transfer->channel = channel;
    transfer->into = into;
    return transfer;
  }

  const FabricOptions options_;
  std::mutex mutex_;
  MessageTable table_;  // under mutex_
  mutable ControlMesh mesh_;
};

}  // namespace chorale::transport
