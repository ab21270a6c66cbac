// The tls fabric: transport/fabric/frame.h says what travels, transport/fabric/control_mesh.h which peers live.
//
// Note [Locks of the tls fabric]
// mutex_ guards what is known of messages and peers, and is held for short: nothing is encrypted, decrypted or copied
// under it. Each outlet has a mutex that is held while it encrypts. landing_ is held by the loop's thread while it
// stores bytes of a message. They are taken in this order: an outlet's or landing_, then mutex_.
#include "chorale/transport/tls/tls_fabric.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/transport/fabric/credit.h"
#include "chorale/transport/fabric/frame.h"
#include "chorale/transport/fabric/mesh_fabric.h"
#include "chorale/transport/keep_alive.h"
#include "chorale/transport/tls/tls_inlet.h"
#include "chorale/transport/tls/tls_join.h"
#include "chorale/transport/tls/tls_outlet.h"

namespace chorale::transport {
namespace {

constexpr int kMaxStreams = 16;

// Streams of a pair: 0 is for control; then, for short frames and for each of bulk, one from the lower rank to the
// higher and one back.
int streams_of_pair(const FabricOptions& options) { return 1 + 2 * (1 + options.streams); }
bool is_outgoing(int stream, int rank, int peer) { return (stream % 2 == 1) == (rank < peer); }

class TlsFabric final : public MeshFabric, private TlsInlet::Receiver {
 public:
  TlsFabric(const FabricOptions& options, std::map<int, std::vector<TlsStream>> streams);
  ~TlsFabric() override;

  const char* name() const override { return "tls"; }
  TransferHandle send(int peer, uint64_t channel, const Envelope& envelope, std::span<const std::byte> data) override;
  TransferHandle receive(int peer, uint64_t channel, std::span<std::byte> into) override;
  std::optional<Found> find(int peer, uint64_t channel) override {
    const std::lock_guard lock(mutex_);
    return find_message(peer, channel);
  }
  bool cancel(const TransferHandle& transfer) override;
  bool withdraw(const TransferHandle& transfer) override;

 private:
  struct Peer {
    int rank = 0;
    std::unique_ptr<TlsOutlet> shorts;
    std::vector<std::unique_ptr<TlsOutlet>> bulk;
    std::vector<std::unique_ptr<TlsInlet>> inlets;
    template <class Action>
    void each_outlet(const Action& action) {
      action(*shorts);
      for (const auto& outlet : bulk) action(*outlet);
    }
    // All under mutex_:
    std::string gone;  // why, when it has
    uint64_t next_id = 0;
    Credit credit;
    std::unordered_map<uint64_t, FabricTransferPtr> announced;  // to it, and not settled
    std::deque<FabricTransferPtr> ready;                        // to it, with bytes to be given out
    std::unordered_map<uint64_t, MessagePtr> landing;           // from it, large
    MessagePtr arriving;                                        // from it, small
  };

  // ControlMesh::Owner and TlsInlet::Receiver: in the mesh's thread.
  bool drained(int rank) override;
  void on_gone(int rank, const Life& life) override;
  MessagePtr on_frame(int rank, const Frame& frame) override;
  void on_body(int rank, const Frame& frame, const MessagePtr& message) override;
  void on_end(int rank, const std::string& why) override { mesh_.suspect(rank, why); }
  void on_nonsense(int rank, const std::string& why) override { mesh_.lose(rank, why); }

  Peer& peer_of(int rank);
  static void fail_landing(Message& message);
  bool take_back(const FabricTransferPtr& transfer);
  bool write_chunk(Peer& peer, TlsOutlet& outlet);

  // These are called under mutex_:
  Frame begin_large(Peer& peer, const MessagePtr& message);
  std::optional<Frame> give_credit(Peer& peer, size_t bytes);
  FabricTransferPtr take_announced(Peer& peer, uint64_t id);
  MessagePtr find_landing(Peer& peer, const Frame& frame);

  std::map<int, Peer> peers_;
  std::mutex landing_;
};

std::map<int, TlsStream> take_control(std::map<int, std::vector<TlsStream>>& streams) {
  std::map<int, TlsStream> control;
  for (auto& [rank, of_pair] : streams) control.emplace(rank, std::move(of_pair.front()));
  return control;
}

TlsFabric::TlsFabric(const FabricOptions& options, std::map<int, std::vector<TlsStream>> streams)
    : MeshFabric(options, take_control(streams)) {
  TlsInlet::Receiver& receiver = *this;
  for (auto& [rank, of_pair] : streams) {
    Peer& peer = peers_[rank];
    peer.rank = rank;
    const auto broken = [this, rank = rank](const std::string& why) { mesh_.suspect(rank, why); };
    for (int i = 1; i < static_cast<int>(of_pair.size()); ++i) {
      TlsStream& stream = of_pair[static_cast<size_t>(i)];
      if (!is_outgoing(i, options.rank, rank)) {
        peer.inlets.push_back(std::make_unique<TlsInlet>(std::move(stream), mesh_.loop(), rank, receiver, landing_));
      } else if (i <= 2) {
        peer.shorts = std::make_unique<TlsOutlet>(std::move(stream), mesh_.loop(), options.chaos, nullptr, broken);
      } else {
        const auto produce = [this, &peer](TlsOutlet& to) { return write_chunk(peer, to); };
        peer.bulk.push_back(
            std::make_unique<TlsOutlet>(std::move(stream), mesh_.loop(), options.chaos, produce, broken));
      }
    }
  }
  mesh_.start();
}

TlsFabric::~TlsFabric() {
  const Deadline deadline = within(std::min(options_.keep_alive, kLeavingTime));
  for (auto& [rank, peer] : peers_) peer.each_outlet([&](TlsOutlet& outlet) { outlet.flush(deadline); });
  for (auto& [rank, peer] : peers_) peer.each_outlet([](TlsOutlet& outlet) { outlet.end(); });
  mesh_.leave();
  for (auto& [rank, peer] : peers_) {
    peer.each_outlet([](TlsOutlet& outlet) { outlet.close(); });
    for (const auto& inlet : peer.inlets) inlet->close();
  }
}

TlsFabric::Peer& TlsFabric::peer_of(int rank) {
  const auto found = peers_.find(rank);
  CHORALE_CHECK(found != peers_.end(), "[tls] rank ", rank, " is not on another host of this job");
  return found->second;
}

TransferHandle TlsFabric::send(int rank, uint64_t channel, const Envelope& envelope, std::span<const std::byte> data) {
  Peer& peer = peer_of(rank);
  const FabricTransferPtr transfer = sending(rank);
  Frame frame = make_frame(FrameKind::kEager, 0, data.size());
  frame.channel = channel;
  frame.envelope = envelope;
  {
    const std::lock_guard lock(mutex_);
    if (!peer.gone.empty()) {
      transfer->settle(Transfer::State::kFailed, peer.gone);
      return transfer;
    }
    if (data.size() <= kEagerBytes && peer.credit.spend(data.size())) {
      transfer->settle(Transfer::State::kDone);  // nobody sees it before the bytes are encrypted
    } else {
      frame.kind = FrameKind::kAnnounce;
      frame.id = transfer->id = ++peer.next_id;
      transfer->data = data;
      peer.announced.emplace(frame.id, transfer);
    }
  }
  if (frame.kind == FrameKind::kAnnounce) {
    peer.shorts->send(frame);
  } else {
    add_checksum(frame, data);
    peer.shorts->send(frame, data);
  }
  return transfer;
}

TransferHandle TlsFabric::receive(int rank, uint64_t channel, std::span<std::byte> into) {
  if (rank != kAnySource) peer_of(rank);
  const FabricTransferPtr transfer = receiving(rank, channel, into);
  std::unique_lock lock(mutex_);
  const MessagePtr message = table_.ask(transfer);
  if (!message) {
    if (rank != kAnySource && !peer_of(rank).gone.empty()) {
      table_.forget(transfer);
      transfer->settle(Transfer::State::kFailed, peer_of(rank).gone);
    }
    return transfer;
  }
  Peer& peer = peer_of(message->source);
  if (message->is_announced) {
    const Frame answer = begin_large(peer, message);
    lock.unlock();
    peer.shorts->send(answer);
  } else if (message->left == 0 && peer.arriving != message) {
    // Nobody else knows of the two any more. (Of an empty message nothing is left even before on_body has seen it.)
    lock.unlock();
    if (into.size() == message->bytes) std::copy_n(message->kept.get(), message->bytes, into.data());
    lock.lock();
    transfer->settle(Transfer::State::kDone);
    const auto credit = give_credit(peer, message->bytes);
    lock.unlock();
    if (credit) peer.shorts->send(*credit);
  }
  return transfer;
}

// A large message has found its receive: the answer to its sender.
Frame TlsFabric::begin_large(Peer& peer, const MessagePtr& message) {
  FabricTransfer& transfer = *message->transfer;
  if (transfer.into.size() != message->bytes) {
    transfer.settle(Transfer::State::kDone);
    return make_frame(FrameKind::kSkip, message->id, 0);
  }
  message->to = transfer.into.data();
  peer.landing.emplace(message->id, message);
  return make_frame(FrameKind::kReady, message->id, 0);
}

// The frame that gives back the credit of a small message that was taken, if it is time for one.
std::optional<Frame> TlsFabric::give_credit(Peer& peer, size_t bytes) {
  const uint64_t credit = peer.credit.release(bytes);
  if (credit == 0) return std::nullopt;
  return make_frame(FrameKind::kCredit, 0, credit);
}

bool TlsFabric::cancel(const TransferHandle& handle) {
  const auto transfer = std::static_pointer_cast<FabricTransfer>(handle);
  if (transfer->is_send) return take_back(transfer);
  const std::scoped_lock lock(landing_, mutex_);
  if (!transfer->pending()) return false;
  if (transfer->message) {
    // The rest of it is thrown away. A small one whose bytes go elsewhere keeps its place.
    if (transfer->message->to == transfer->into.data()) transfer->message->to = nullptr;
  } else {
    table_.forget(transfer);
  }
  transfer->settle(Transfer::State::kFailed, "cancelled");
  return true;
}

bool TlsFabric::withdraw(const TransferHandle& handle) {
  const auto transfer = std::static_pointer_cast<FabricTransfer>(handle);
  const std::lock_guard lock(mutex_);
  if (!transfer->pending() || transfer->message || !table_.forget(transfer)) return false;
  transfer->settle(Transfer::State::kFailed, "cancelled");
  return true;
}

bool TlsFabric::take_back(const FabricTransferPtr& transfer) {
  Peer& peer = peer_of(transfer->peer);
  bool is_ready = false;
  {
    const std::lock_guard lock(mutex_);
    if (!transfer->pending()) return false;
    transfer->is_taken_back = true;
    is_ready = transfer->is_ready;
    take_announced(peer, transfer->id);
    transfer->settle(Transfer::State::kFailed, "cancelled");
  }
  if (is_ready) {
    for (const auto& outlet : peer.bulk) outlet->fence();
    for (const auto& outlet : peer.bulk) outlet->pump();
  } else {
    peer.shorts->send(make_frame(FrameKind::kWithdraw, transfer->id, 0));
  }
  return true;
}

FabricTransferPtr TlsFabric::take_announced(Peer& peer, uint64_t id) {
  const auto found = peer.announced.find(id);
  if (found == peer.announced.end()) return nullptr;
  FabricTransferPtr transfer = found->second;
  peer.announced.erase(found);
  return transfer;
}

// Called in the thread that pumps; the outlet's mutex is held.
bool TlsFabric::write_chunk(Peer& peer, TlsOutlet& outlet) {
  FabricTransferPtr transfer;
  Frame frame;
  {
    const std::lock_guard lock(mutex_);
    if (peer.ready.empty()) return false;
    transfer = peer.ready.front();
    const size_t left = transfer->data.size() - transfer->given_out;
    frame = transfer->is_taken_back ? make_frame(FrameKind::kFiller, transfer->id, left)
                                    : make_frame(FrameKind::kChunk, transfer->id, std::min(left, kChunkBytes));
    frame.offset = transfer->given_out;
    transfer->given_out += frame.bytes;
    if (frame.bytes == left) peer.ready.pop_front();
  }
  const auto body = transfer->data.subspan(frame.offset, body_bytes(frame));
  if (!body.empty()) add_checksum(frame, body);
  outlet.write(frame, body);
  {
    const std::lock_guard lock(mutex_);
    transfer->encrypted += body.size();
    if (transfer->encrypted < transfer->data.size()) return true;
    transfer->settle(Transfer::State::kDone);
    take_announced(peer, transfer->id);
  }
  mesh_.events().add();
  return true;
}

MessagePtr TlsFabric::find_landing(Peer& peer, const Frame& frame) {
  const auto found = peer.landing.find(frame.id);
  CHORALE_CHECK(found != peer.landing.end(), "[tls] rank ", peer.rank,
                " sent a chunk of a message that nobody asked for");
  const MessagePtr message = found->second;
  CHORALE_CHECK(frame.bytes <= message->left && frame.offset <= message->bytes - frame.bytes, "[tls] rank ", peer.rank,
                " sent ", frame.bytes, " bytes at ", frame.offset, " of a message of ", message->bytes, ", of which ",
                message->left, " are missing");
  return message;
}

MessagePtr TlsFabric::on_frame(int rank, const Frame& frame) {
  Peer& peer = peer_of(rank);
  std::unique_lock lock(mutex_);
  switch (frame.kind) {
    case FrameKind::kEager: {
      peer.credit.hold(frame.bytes);
      const MessagePtr message = std::make_shared<Message>(rank, frame);
      const FabricTransferPtr transfer = table_.offer(message);
      if (!transfer) {
        message->kept.reset(new std::byte[frame.bytes]);
        message->to = message->kept.get();
      } else if (transfer->into.size() == frame.bytes) {
        message->to = transfer->into.data();
      }
      peer.arriving = message;
      return message;
    }
    case FrameKind::kAnnounce: {
      const MessagePtr message = std::make_shared<Message>(rank, frame);
      if (!table_.offer(message)) {
        if (!table_.is_watched(message->channel)) return nullptr;
        break;
      }
      const Frame answer = begin_large(peer, message);
      lock.unlock();
      peer.shorts->send(answer);
      if (answer.kind == FrameKind::kSkip) mesh_.events().add();
      return nullptr;
    }
    case FrameKind::kReady: {
      const auto found = peer.announced.find(frame.id);
      if (found == peer.announced.end()) return nullptr;  // it was withdrawn
      CHORALE_CHECK(!std::exchange(found->second->is_ready, true), "[tls] rank ", rank,
                    " is ready twice for a message");
      peer.ready.push_back(found->second);
      lock.unlock();
      for (const auto& outlet : peer.bulk) outlet->pump();
      return nullptr;
    }
    case FrameKind::kSkip:
      if (const FabricTransferPtr transfer = take_announced(peer, frame.id)) transfer->settle(Transfer::State::kDone);
      break;
    case FrameKind::kWithdraw: {
      const auto found = peer.landing.find(frame.id);
      if (found == peer.landing.end()) {
        table_.forget(rank, frame.id);
        return nullptr;
      }
      fail_landing(*found->second);
      peer.landing.erase(found);
      break;
    }
    case FrameKind::kCredit:
      peer.credit.refund(frame.bytes);
      return nullptr;
    case FrameKind::kHello:
      throw InvalidArgument(concat("[tls] rank ", rank, " greets, which only ucx does"));
    case FrameKind::kChunk:
      return find_landing(peer, frame);
    case FrameKind::kFiller: {
      const MessagePtr message = find_landing(peer, frame);
      fail_landing(*message);
      message->left -= frame.bytes;
      if (message->left == 0) peer.landing.erase(frame.id);
      break;
    }
  }
  lock.unlock();
  mesh_.events().add();
  return nullptr;
}

void TlsFabric::fail_landing(Message& message) {
  message.to = nullptr;
  if (message.transfer) {
    message.transfer->settle(Transfer::State::kFailed, concat("rank ", message.source, " took its message back"));
  }
}

void TlsFabric::on_body(int rank, const Frame& frame, const MessagePtr& message) {
  Peer& peer = peer_of(rank);
  std::optional<Frame> credit;
  {
    // A receive may have come while the bytes went to memory of ours.
    const std::scoped_lock lock(landing_, mutex_);
    message->left -= frame.bytes;
    const FabricTransferPtr transfer = message->transfer;
    if (frame.kind == FrameKind::kEager) {
      peer.arriving.reset();
      if (!message->is_taken) {
        if (table_.is_watched(message->channel)) mesh_.events().add();
        return;
      }
      if (transfer && message->kept && transfer->into.size() == message->bytes) {
        std::copy_n(message->kept.get(), message->bytes, transfer->into.data());
      }
      credit = give_credit(peer, message->bytes);
    } else if (message->left == 0) {
      peer.landing.erase(message->id);
    } else {
      return;
    }
    if (transfer) transfer->settle(Transfer::State::kDone);
  }
  if (credit) peer.shorts->send(*credit);
  mesh_.events().add();
}

bool TlsFabric::drained(int rank) {
  const auto& inlets = peer_of(rank).inlets;
  return std::all_of(inlets.begin(), inlets.end(), [](const auto& inlet) { return inlet->has_ended(); });
}

void TlsFabric::on_gone(int rank, const Life& life) {
  Peer& peer = peer_of(rank);
  // From here on nobody touches the memory of a transfer with this peer.
  for (const auto& inlet : peer.inlets) inlet->close();
  peer.each_outlet([](TlsOutlet& outlet) { outlet.close(); });
  const std::lock_guard lock(mutex_);
  peer.gone = life.text;
  std::vector<FabricTransferPtr> failed = table_.forget_peer(rank);
  for (const auto& [id, transfer] : peer.announced) failed.push_back(transfer);
  for (const auto& [id, message] : peer.landing) {
    if (message->transfer) failed.push_back(message->transfer);
  }
  if (peer.arriving && peer.arriving->transfer) failed.push_back(peer.arriving->transfer);
  peer.arriving.reset();
  peer.announced.clear();
  peer.ready.clear();
  peer.landing.clear();
  for (const FabricTransferPtr& transfer : failed) transfer->settle(Transfer::State::kFailed, life.text);
}

class TlsFabricBuilder final : public FabricBuilder {
 public:
  TlsFabricBuilder(const FabricOptions& options, const std::string& own_address)
      : options_(options), join_(options, own_address) {
    CHORALE_CHECK(options.streams >= 1 && options.streams <= kMaxStreams, "[tls] ", options.streams,
                  " streams per pair; expected 1 to ", kMaxStreams);
    CHORALE_CHECK(options.keep_alive >= std::chrono::milliseconds(10), "[tls] a keep-alive of ",
                  options.keep_alive.count(), " ms; expected at least 10");
  }
  FabricAddress address() override { return {0, join_.endpoint(), {}}; }
  std::unique_ptr<Fabric> connect(const std::vector<FabricAddress>& addresses, Deadline deadline) override {
    return std::make_unique<TlsFabric>(options_, join_.meet(addresses, streams_of_pair(options_), deadline));
  }

 private:
  const FabricOptions options_;
  TlsJoin join_;
};

}  // namespace

std::unique_ptr<FabricBuilder> make_tls_fabric(const FabricOptions& options, const std::string& own_address) {
  return std::make_unique<TlsFabricBuilder>(options, own_address);
}

}  // namespace chorale::transport
