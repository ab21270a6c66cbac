// Messages of a fabric and the transfers that callers hold (Note [Messages between two ranks]).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "chorale/transport/fabric/fabric.h"
#include "chorale/transport/fabric/frame.h"

namespace chorale::transport {

struct Message;
using MessagePtr = std::shared_ptr<Message>;

// The fabric's mutex guards it, as all of this file, except what Transfer says.
struct FabricTransfer : Transfer {
  bool is_send = false;
  int peer = 0;  // or kAnySource
  uint64_t channel = 0;

  // What a receive has.
  std::span<std::byte> into;
  MessagePtr message;  // the message that it takes, from when that was found until it has ended

  // What an announced send has.
  uint64_t id = 0;
  std::span<const std::byte> data;
  bool is_ready = false;       // the peer waits for it
  size_t given_out = 0;        // bytes that bulk connections have taken to send
  size_t encrypted = 0;        // bytes that they are done with
  bool is_taken_back = false;  // the rest is replaced by filler

  // The first one counts.
  void settle(State state, const std::string& why = {});
};
using FabricTransferPtr = std::shared_ptr<FabricTransfer>;

// A message that is coming, or has come and nobody has asked for it yet.
struct Message {
  Message() = default;
  // The message that a frame of kEager or kAnnounce tells of.
  Message(int from, const Frame& frame);

  int source = 0;
  uint64_t channel = 0;
  uint64_t id = 0;
  bool is_announced = false;
  Envelope envelope;
  size_t bytes = 0;
  std::optional<uint32_t> checksum;   // of all its bytes, if they are announced with one
  size_t left = 0;                    // bytes that have not come
  std::unique_ptr<std::byte[]> kept;  // the bytes of a small message that came before anybody asked for it
  // Where its bytes go: kept, or the receiver's memory; null throws them away. Changed only while nobody is receiving
  // (TlsFabric::landing_).
  std::byte* to = nullptr;
  bool is_taken = false;       // asked for, even if given up since
  FabricTransferPtr transfer;  // that receives it
};

// Receives that wait for messages, and messages that wait for a receive, both in order.
class MessageTable {
 public:
  // Finds the message for a new receive; without one the receive waits.
  MessagePtr ask(const FabricTransferPtr& transfer);
  // Finds the receive for a new message; without one the message waits.
  FabricTransferPtr offer(const MessagePtr& message);
  // The message that a receive from this peer (or from any) would get; null when there is none: then messages of the
  // channel are watched for.
  MessagePtr find(int peer, uint64_t channel);
  bool is_watched(uint64_t channel) const { return !watched_.empty() && watched_.contains(channel); }
  // False when it does not wait here.
  bool forget(const FabricTransferPtr& transfer);
  // An announced message that waits; null when there is none.
  MessagePtr forget(int source, uint64_t id);
  // The peer has gone: its unfinished messages are forgotten, and receives that wait for it alone are returned. What
  // came whole stays.
  std::vector<FabricTransferPtr> forget_peer(int source);

 private:
  struct Channel {
    std::deque<FabricTransferPtr> receives;
    std::deque<MessagePtr> messages;
    bool empty() const { return receives.empty() && messages.empty(); }
  };
  std::unordered_map<uint64_t, Channel> channels_;
  std::unordered_set<uint64_t> watched_;  // channels
};

}  // namespace chorale::transport
