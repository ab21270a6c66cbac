// How transfers of the ucx fabric end that do not end by themselves: cancelled, or with their peer.
#include <algorithm>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/transport/ucx/ucx_fabric.h"

namespace chorale::transport {

using namespace std::chrono_literals;

// Note [Both must not cut]
// What cannot be cancelled may end by itself, for a peer that lives takes it; after `time_to_cancel` the connection is
// cut. If two ranks cut at the same moment, each gets the other's farewell on a connection that it has given up, and
// UCX 1.13 then frees what it writes to in the next line (tests/fault_matrix: 7 of 300 runs of
// wrong_op/all_reduce_coalesced/ucx/2/2492890946/2 on a busy machine ended with SIGSEGV while both waited for 20 ms).
// The rank that cuts second, after it has read the farewell, is safe. So the rank with the higher number waits twice as
// long.

bool UcxFabric::cancel(const TransferHandle& handle) {
  const auto transfer = std::static_pointer_cast<FabricTransfer>(handle);
  const Turn turn(*this);
  if (!transfer->pending()) return false;
  if (!transfer->is_send && table_.forget(transfer)) {
    transfer->settle(Transfer::State::kFailed, "cancelled");
    return true;
  }
  if (transfer->is_send && peer_of(transfer->peer).announced.erase(transfer->id) > 0) {
    send_frame(transfer->peer, make_frame(FrameKind::kWithdraw, transfer->id, 0));
    transfer->settle(Transfer::State::kFailed, "cancelled");
    return true;
  }
  return take_back(transfer);
}

bool UcxFabric::withdraw(const TransferHandle& handle) {
  const auto transfer = std::static_pointer_cast<FabricTransfer>(handle);
  const Turn turn(*this);
  if (!transfer->pending() || !table_.forget(transfer)) return false;
  transfer->settle(Transfer::State::kFailed, "cancelled");
  return true;
}

// Takes a transfer back from UCX. It may end well in the meantime; if it does not end, the connection is cut.
bool UcxFabric::take_back(const FabricTransferPtr& transfer) {
  for (auto& [rank, peer] : peers_) {
    if (std::erase(peer.stranded, transfer) == 0) continue;
    transfer->settle(Transfer::State::kFailed, "cancelled");
    return true;
  }
  const auto flying =
      std::find_if(flying_.begin(), flying_.end(), [&](const Flying& one) { return one.transfer == transfer; });
  CHORALE_INVARIANT(flying != flying_.end(), "a transfer that nobody knows");
  flying->is_cancelled = true;
  const int rank = flying->peer;
  const uint64_t id = flying->id;
  worker_->cancel(flying->request);
  const Deadline patience = within((options_.rank < rank ? 1 : 2) * options_.time_to_cancel);
  while (transfer->pending() && !patience.passed()) drive();
  if (transfer->pending()) {
    fly({worker_->disconnect(rank), rank});
    const Deadline limit = within(1s);
    while (transfer->pending() && !limit.passed()) drive();
    CHORALE_INVARIANT(!transfer->pending(), "UCX does not let go of a message");
    suspect(rank, "its connection was cut in the middle of a message that was given up");
  }
  const bool cancelled = transfer->state() == Transfer::State::kFailed;
  // Its bytes may still come: cut off to nothing, which frees their sender.
  if (cancelled && !transfer->is_send && peer_of(rank).gone.empty())
    fly({worker_->receive(data_tag(rank, id), {}), rank, nullptr, {}, id});
  if (drivers_ == 0) rest();
  return cancelled;
}

void UcxFabric::suspect(int rank, const std::string& why) {
  const auto found = peers_.find(rank);
  if (found == peers_.end() || !found->second.broken.empty()) return;
  found->second.broken = why;
  mesh_.suspect(rank, why);
}

void UcxFabric::strand(int rank, const FabricTransferPtr& transfer, const std::string& why) {
  if (transfer) peer_of(rank).stranded.push_back(transfer);
  suspect(rank, why);
}

bool UcxFabric::drained(int rank) {
  const Turn turn(*this);
  // Its last messages may still be on their way, unless UCX has noticed the end, too.
  return !peer_of(rank).broken.empty();
}

void UcxFabric::on_gone(int rank, const Life& life) {
  const Turn turn(*this);
  drive();
  peer_of(rank).gone = life.text;
  fly({worker_->disconnect(rank), rank});
  fail_all(rank, life.text);
  if (drivers_ == 0) rest();
}

void UcxFabric::fail_all(int rank, const std::string& why) {
  for (const FabricTransferPtr& transfer : table_.forget_peer(rank)) transfer->settle(Transfer::State::kFailed, why);
  for (const auto& [id, transfer] : std::exchange(peer_of(rank).announced, {}))
    transfer->settle(Transfer::State::kFailed, why);
  for (const FabricTransferPtr& transfer : std::exchange(peer_of(rank).stranded, {}))
    transfer->settle(Transfer::State::kFailed, why);
  if (arriving_ && arriving_from_ == rank) worker_->cancel(arriving_);
  for (Flying& flying : flying_) {
    if (flying.peer == rank) worker_->cancel(flying.request);
  }
  // What was in flight with it ends now; a receive from it that UCX would keep waiting has been cancelled.
  const auto is_left = [&](const Flying& flying) { return flying.peer == rank && flying.transfer; };
  const Deadline limit = within(1s);
  while (std::any_of(flying_.begin(), flying_.end(), is_left) && !limit.passed()) drive();
}

}  // namespace chorale::transport
