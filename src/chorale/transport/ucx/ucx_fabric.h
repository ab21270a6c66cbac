// The ucx fabric: the data of messages goes by UCX, over the network devices that the user trusts; identities,
// signs of life and what ranks tell each other go by TLS (transport/fabric/control_mesh.h).
//
// Note [Messages of the ucx fabric]
// Which receive gets which message is decided here, not by UCX's tags: a receive may be for any source, and a message
// of the wrong size must not be stored. So frames (Note [Messages between two ranks]) go to one queue at the receiver.
// A small message follows its frame at once. When somebody has asked for a large one, the receiver gives UCX its place
// and says that it is ready, and its bytes go straight there, as a message with a tag of its own.
//
// Note [Which thread moves UCX]
// UCX moves only while a thread calls it. A thread that waits for an event calls it, for as long as something moves;
// the mesh's thread does when no other waits, woken by UCX's descriptor. Neither may keep the others out: the driving
// thread lets those in that wait for mutex_ (Turn), and the mesh's thread goes back to its other work after every few
// steps, for it also tells the peers that this rank lives.
//
// Note [When UCX notices first]
// UCX may see that a connection broke before the mesh knows why. What it says of it is no news for a caller ("the
// connection broke"), and life() does not show the peer as gone yet. So it is a suspicion (ControlMesh::suspect), the
// transfers that UCX has failed are stranded, and both end with the mesh's reason in on_gone().
#pragma once

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "chorale/transport/fabric/credit.h"
#include "chorale/transport/fabric/frame.h"
#include "chorale/transport/fabric/mesh_fabric.h"
#include "chorale/transport/ucx/ucx.h"

namespace chorale::transport {

// Tags: frames of all senders go to one queue, data has its sender and the message's number.
inline constexpr uint64_t kFrameTag = uint64_t{1} << 63;
inline uint64_t frame_tag(int from) { return kFrameTag | static_cast<uint64_t>(from); }
inline uint64_t data_tag(int from, uint64_t id) {
  return static_cast<uint64_t>(from) << 40 | (id & ((uint64_t{1} << 40) - 1));
}

class UcxFabric final : public MeshFabric, private IoLoop::Handler {
 public:
  UcxFabric(const FabricOptions& options, std::unique_ptr<UcxWorker> worker, std::map<int, TlsStream> control,
            const std::vector<FabricAddress>& addresses, Deadline deadline);
  ~UcxFabric() override;

  const char* name() const override { return "ucx"; }
  TransferHandle send(int peer, uint64_t channel, const Envelope& envelope, std::span<const std::byte> data) override;
  TransferHandle receive(int peer, uint64_t channel, std::span<std::byte> into) override;
  std::optional<Found> find(int peer, uint64_t channel) override {
    const Turn turn(*this);
    return find_message(peer, channel);
  }
  bool cancel(const TransferHandle& transfer) override;
  bool withdraw(const TransferHandle& transfer) override;

  void await_event(uint32_t seen, Deadline deadline) override;

 private:
  struct Peer {
    bool greeted = false;
    std::string gone;      // why, when it has
    std::string broken;    // what UCX says of its connection, when it does not work any more
    bool accused = false;  // something that came from it was damaged
    uint64_t next_id = 0;
    Credit credit;
    std::unordered_map<uint64_t, FabricTransferPtr> announced;  // sends that wait for its word
    std::vector<FabricTransferPtr> stranded;                    // Note [When UCX notices first]
  };
  // Something that UCX works on. The frame of a send lives here.
  struct Flying {
    UcxWorker::Request request = nullptr;
    int peer = -1;
    FabricTransferPtr transfer = {};  // settled when it ends, if there is one
    std::unique_ptr<Frame> frame = {};
    uint64_t id = 0;  // of an announced message that is received
    bool is_cancelled = false;
    std::vector<std::byte> damaged = {};  // what is sent in place of the caller's data, by a fault on purpose
  };

  // Takes mutex_, before the driving thread takes it again.
  class Turn {
   public:
    explicit Turn(UcxFabric& fabric) : lock_(fabric.mutex_, std::defer_lock) {
      ++fabric.waiting_;
      lock_.lock();
      --fabric.waiting_;
    }

   private:
    std::unique_lock<std::mutex> lock_;
  };

  Peer& peer_of(int rank);
  // All below under mutex_.
  bool drive();
  bool take_frames();
  bool end_flights();
  void land(Flying& flying);
  void on_frame(int from, const Frame& frame, std::span<const std::byte> body);
  void on_message(int from, const Frame& frame, std::span<const std::byte> body);
  void on_answer(int from, const Frame& frame);
  void begin(const MessagePtr& message);
  void give_credit(int rank, size_t bytes);
  void send_frame(int rank, const Frame& frame, std::span<const std::byte> body = {},
                  const FabricTransferPtr& transfer = {});
  void send_data(int rank, const FabricTransferPtr& transfer);
  // Faults on purpose; false: the connection was cut.
  bool spoil(Flying& flying, std::span<const std::byte>& body);
  // What has come from the peer is not what a sound one sends.
  void accuse(int rank, const std::string& why);
  void fly(Flying flying);
  void suspect(int rank, const std::string& why);
  void strand(int rank, const FabricTransferPtr& transfer, const std::string& why);
  void fail_all(int rank, const std::string& why);
  bool take_back(const FabricTransferPtr& transfer);
  void rest();

  // ControlMesh::Owner and IoLoop::Handler: in the mesh's thread.
  bool drained(int rank) override;
  void on_gone(int rank, const Life& life) override;
  void on_ready(uint32_t events) override;

  std::unique_ptr<UcxWorker> worker_;
  const int descriptor_;
  std::map<int, Peer> peers_;
  std::atomic<int> waiting_{0};  // for mutex_
  std::list<Flying> flying_;
  // The frame that is being received. They are taken one by one, so that they stay in order.
  UcxWorker::Request arriving_ = nullptr;
  int arriving_from_ = -1;
  std::vector<std::byte> arrived_;
  int drivers_ = 0;
  bool muted_ = false;  // the mesh's thread does not look at the descriptor
};

}  // namespace chorale::transport
