#include "chorale/transport/fabric/message.h"

#include <algorithm>

namespace chorale::transport {
namespace {

bool fits(const FabricTransfer& transfer, const Message& message) {
  return transfer.peer == Fabric::kAnySource || transfer.peer == message.source;
}

void marry(const FabricTransferPtr& transfer, const MessagePtr& message) {
  transfer->source = message->source;
  transfer->envelope = message->envelope;
  transfer->bytes = message->bytes;
  transfer->message = message;
  message->transfer = transfer;
  message->is_taken = true;
}

}  // namespace

Message::Message(int from, const Frame& frame)
    : source(from),
      channel(frame.channel),
      id(frame.id),
      is_announced(frame.kind == FrameKind::kAnnounce),
      envelope(frame.envelope),
      bytes(frame.bytes),
      checksum(frame.has_checksum != 0 ? std::optional(frame.checksum) : std::nullopt),
      left(frame.bytes) {}

void FabricTransfer::settle(State state, const std::string& why) {
  if (!pending()) return;
  if (message) message->transfer.reset();
  message.reset();
  error = why;
  state_.store(state, std::memory_order_release);
}

MessagePtr MessageTable::ask(const FabricTransferPtr& transfer) {
  Channel& channel = channels_[transfer->channel];
  const auto found = std::find_if(channel.messages.begin(), channel.messages.end(),
                                  [&](const MessagePtr& message) { return fits(*transfer, *message); });
  if (found == channel.messages.end()) {
    channel.receives.push_back(transfer);
    return nullptr;
  }
  MessagePtr message = *found;
  channel.messages.erase(found);
  if (channel.empty()) channels_.erase(transfer->channel);
  marry(transfer, message);
  return message;
}

FabricTransferPtr MessageTable::offer(const MessagePtr& message) {
  Channel& channel = channels_[message->channel];
  const auto found = std::find_if(channel.receives.begin(), channel.receives.end(),
                                  [&](const FabricTransferPtr& transfer) { return fits(*transfer, *message); });
  if (found == channel.receives.end()) {
    channel.messages.push_back(message);
    return nullptr;
  }
  FabricTransferPtr transfer = *found;
  channel.receives.erase(found);
  if (channel.empty()) channels_.erase(message->channel);
  marry(transfer, message);
  return transfer;
}

MessagePtr MessageTable::find(int peer, uint64_t channel) {
  const auto known = channels_.find(channel);
  if (known != channels_.end()) {
    for (const MessagePtr& message : known->second.messages) {
      if (peer == Fabric::kAnySource || peer == message->source) return message;
    }
  }
  watched_.insert(channel);
  return nullptr;
}

bool MessageTable::forget(const FabricTransferPtr& transfer) {
  const auto channel = channels_.find(transfer->channel);
  if (channel == channels_.end()) return false;
  const bool found = std::erase(channel->second.receives, transfer) > 0;
  if (channel->second.empty()) channels_.erase(channel);
  return found;
}

MessagePtr MessageTable::forget(int source, uint64_t id) {
  for (auto channel = channels_.begin(); channel != channels_.end(); ++channel) {
    auto& messages = channel->second.messages;
    const auto found = std::find_if(messages.begin(), messages.end(), [&](const MessagePtr& message) {
      return message->is_announced && message->source == source && message->id == id;
    });
    if (found == messages.end()) continue;
    MessagePtr message = *found;
    messages.erase(found);
    if (channel->second.empty()) channels_.erase(channel);
    return message;
  }
  return nullptr;
}

std::vector<FabricTransferPtr> MessageTable::forget_peer(int source) {
  std::vector<FabricTransferPtr> waiting;
  for (auto channel = channels_.begin(); channel != channels_.end();) {
    std::erase_if(channel->second.messages, [&](const MessagePtr& message) {
      return message->source == source && (message->is_announced || message->left > 0);
    });
    std::erase_if(channel->second.receives, [&](const FabricTransferPtr& transfer) {
      if (transfer->peer == source) waiting.push_back(transfer);
      return transfer->peer == source;
    });
    channel = channel->second.empty() ? channels_.erase(channel) : std::next(channel);
  }
  return waiting;
}

}  // namespace chorale::transport
