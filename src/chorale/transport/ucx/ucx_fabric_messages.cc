// Messages of the ucx fabric (Note [Messages of the ucx fabric]): sent, received, matched.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/transport/fabric/chaos.h"
#include "chorale/transport/ucx/ucx_fabric.h"

namespace chorale::transport {

void UcxFabric::fly(Flying flying) {
  if (flying.request) {
    flying_.push_back(std::move(flying));
  } else if (flying.transfer) {
    flying.transfer->settle(Transfer::State::kDone);
  }
}

void UcxFabric::send_frame(int rank, const Frame& frame, std::span<const std::byte> body,
                           const FabricTransferPtr& transfer) {
  Flying flying{nullptr, rank, transfer, std::make_unique<Frame>(seal(frame))};
  if (options_.chaos && !spoil(flying, body)) [[unlikely]]
    return;
  try {
    const auto head = std::as_bytes(std::span(flying.frame.get(), 1));
    flying.request = worker_->send(rank, frame_tag(options_.rank), head, body);
  } catch (const std::runtime_error& error) {
    return strand(rank, transfer, error.what());
  }
  fly(std::move(flying));
}

bool UcxFabric::spoil(Flying& flying, std::span<const std::byte>& body) {
  const int rank = flying.peer;
  const Chaos::Write fault = options_.chaos->before_write(kFrameBytes + body.size(), !body.empty());
  if (fault.reset) {
    fly({worker_->disconnect(rank), rank});
    strand(rank, flying.transfer, concat("the connection to rank ", rank, " was reset on purpose"));
    return false;
  }
  if (fault.corrupt_control) options_.chaos->flip(std::as_writable_bytes(std::span(flying.frame.get(), 1)));
  if (fault.corrupt_payload) {
    flying.damaged.assign(body.begin(), body.end());
    options_.chaos->flip(flying.damaged);
    body = flying.damaged;
  }
  return true;
}

void UcxFabric::send_data(int rank, const FabricTransferPtr& transfer) {
  Flying flying{nullptr, rank, transfer};
  std::span<const std::byte> data = transfer->data;
  if (options_.chaos) [[unlikely]] {
    flying.damaged.assign(data.begin(), data.end());
    options_.chaos->touch(ChaosFault::What::kPayload, flying.damaged);
    data = flying.damaged;
  }
  try {
    flying.request = worker_->send(rank, data_tag(options_.rank, transfer->id), {}, data);
    fly(std::move(flying));
  } catch (const std::runtime_error& error) {
    strand(rank, transfer, error.what());
  }
}

TransferHandle UcxFabric::send(int rank, uint64_t channel, const Envelope& envelope, std::span<const std::byte> data) {
  const FabricTransferPtr transfer = sending(rank);
  transfer->data = data;
  Frame frame = make_frame(FrameKind::kEager, 0, data.size());
  frame.channel = channel;
  frame.envelope = envelope;
  const Turn turn(*this);
  Peer& peer = peer_of(rank);
  if (!peer.gone.empty()) {
    transfer->settle(Transfer::State::kFailed, peer.gone);
    return transfer;
  }
  if (!data.empty()) add_checksum(frame, data);
  if (data.size() <= kEagerBytes && peer.credit.spend(data.size())) {
    send_frame(rank, frame, data, transfer);
    return transfer;
  }
  frame.kind = FrameKind::kAnnounce;
  frame.id = transfer->id = ++peer.next_id;
  peer.announced.emplace(frame.id, transfer);
  send_frame(rank, frame);
  return transfer;
}

TransferHandle UcxFabric::receive(int rank, uint64_t channel, std::span<std::byte> into) {
  const FabricTransferPtr transfer = receiving(rank, channel, into);
  const Turn turn(*this);
  if (rank != kAnySource) peer_of(rank);
  const MessagePtr message = table_.ask(transfer);
  if (message) {
    begin(message);
  } else if (rank != kAnySource && !peer_of(rank).gone.empty()) {
    table_.forget(transfer);
    transfer->settle(Transfer::State::kFailed, peer_of(rank).gone);
  }
  return transfer;
}

// A message has found its receive.
void UcxFabric::begin(const MessagePtr& message) {
  const FabricTransferPtr transfer = message->transfer;
  const int rank = message->source;
  const bool fits = transfer->into.size() == message->bytes;
  if (!message->is_announced) {
    if (fits && message->bytes > 0) std::memcpy(transfer->into.data(), message->kept.get(), message->bytes);
    transfer->settle(Transfer::State::kDone);
    give_credit(rank, message->bytes);
    return;
  }
  if (fits) {
    fly({worker_->receive(data_tag(rank, message->id), transfer->into), rank, transfer, {}, message->id});
  } else {
    transfer->settle(Transfer::State::kDone);
  }
  send_frame(rank, make_frame(fits ? FrameKind::kReady : FrameKind::kSkip, message->id, 0));
}

void UcxFabric::give_credit(int rank, size_t bytes) {
  const uint64_t credit = peer_of(rank).credit.release(bytes);
  if (credit > 0) send_frame(rank, make_frame(FrameKind::kCredit, 0, credit));
}

void UcxFabric::on_frame(int from, const Frame& frame, std::span<const std::byte> body) {
  CHORALE_CHECK(body.size() == body_bytes(frame), "a message of ", body.size(),
                " bytes does not fit its frame, which says ", body_bytes(frame));
  if (!body.empty() && frame.has_checksum != 0) check_checksum(frame.checksum, crc32c(body), from);
  if (frame.kind == FrameKind::kEager || frame.kind == FrameKind::kAnnounce) {
    on_message(from, frame, body);
  } else {
    on_answer(from, frame);
  }
}

void UcxFabric::on_message(int from, const Frame& frame, std::span<const std::byte> body) {
  const auto message = std::make_shared<Message>(from, frame);
  if (message->is_announced) {
    if (table_.offer(message)) begin(message);
    return;
  }
  peer_of(from).credit.hold(frame.bytes);
  const FabricTransferPtr transfer = table_.offer(message);
  message->left = 0;
  if (transfer && transfer->into.size() == body.size()) {
    if (!body.empty()) std::memcpy(transfer->into.data(), body.data(), body.size());
    transfer->settle(Transfer::State::kDone);
    return give_credit(from, body.size());
  }
  message->kept.reset(new std::byte[body.size()]);
  if (!body.empty()) std::memcpy(message->kept.get(), body.data(), body.size());
  if (transfer) begin(message);
}

void UcxFabric::on_answer(int from, const Frame& frame) {
  Peer& peer = peer_of(from);
  switch (frame.kind) {
    case FrameKind::kHello:
      peer.greeted = true;
      return;
    case FrameKind::kCredit:
      return peer.credit.refund(frame.bytes);
    case FrameKind::kWithdraw: {
      if (table_.forget(from, frame.id)) return;
      // Somebody is ready for it: nothing has come, so UCX lets go at once.
      const auto flying = std::find_if(flying_.begin(), flying_.end(), [&](const Flying& one) {
        return one.peer == from && one.id == frame.id && one.transfer;
      });
      if (flying == flying_.end()) return;
      worker_->cancel(flying->request);
      std::exchange(flying->transfer, nullptr)
          ->settle(Transfer::State::kFailed, concat("rank ", from, " took its message back"));
      return;
    }
    case FrameKind::kReady:
    case FrameKind::kSkip: {
      const auto found = peer.announced.find(frame.id);
      if (found == peer.announced.end()) return;  // it was withdrawn
      const FabricTransferPtr transfer = found->second;
      peer.announced.erase(found);
      if (frame.kind == FrameKind::kReady) return send_data(from, transfer);
      transfer->settle(Transfer::State::kDone);
      return;
    }
    default:
      throw InvalidArgument(concat("a frame of kind ", static_cast<int>(frame.kind), ", which only tls sends"));
  }
}

}  // namespace chorale::transport
