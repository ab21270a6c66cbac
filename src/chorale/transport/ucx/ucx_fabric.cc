// The ucx fabric: the data of messages goes by UCX, over the network devices that the user trusts; who is who, who is
// alive and what ranks tell each other goes by TLS (transport/control_mesh.h).
//
// Note [Messages of the ucx fabric]
// Which receive gets which message is decided here, not by UCX's tags: a receive may be for any source, and a message
// of the wrong size must not be stored. Each message has a head, which goes to a queue of heads at the receiver. A
// small message follows its head at once. A large one is announced; when somebody has asked for it, the receiver gives
// UCX its place and says that it is ready, and its bytes go straight there, as a message with a tag of its own. A
// sender may have kCreditBytes of small messages at a receiver that nobody has asked for; beyond that they are
// announced, too.
//
// Note [Who moves UCX]
// UCX moves only while somebody calls it. Who waits for an event calls it himself, for as long as something moves; the
// mesh's thread does when nobody waits, woken by UCX's descriptor. Neither may keep the others out: who drives lets
// those in who wait for mutex_ (Turn), and the mesh's thread goes back to its other work after every few steps, for
// it also tells the peers that this rank lives.
//
// Note [When UCX notices first]
// UCX may see that a connection broke before the mesh knows why. What it says of it is no news for a caller ("the
// connection broke"), and life() does not show the peer as gone yet. So it is a suspicion (ControlMesh::suspect), the
// transfers that UCX has failed are stranded, and both end with the mesh's reason in on_gone().
#include "chorale/transport/ucx/ucx.h"

#include <immintrin.h>
#include <sys/epoll.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/base/module.h"
#include "chorale/transport/control_mesh.h"
#include "chorale/transport/fabric.h"
#include "chorale/transport/tls_join.h"
#include "chorale/transport/tls_message.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr uint64_t kCreditBytes = 4 << 20;
constexpr uint64_t kMostMessageBytes = uint64_t{1} << 48;
// After this long without anything moving, who waits leaves it to the mesh's thread.
constexpr Clock::duration kDriveTime = 100us;
// Then others have their turn.
constexpr int kStepsPerTurn = 32;
// What cannot be cancelled may end by itself within this time, before the connection is cut.
constexpr Clock::duration kCancelTime = 20ms;

enum class HeadKind : uint32_t { kHello, kSmall, kAnnounce, kReady, kSkip, kWithdraw, kCredit };
struct Head {
  HeadKind kind = HeadKind::kHello;
  uint32_t unused = 0;
  uint64_t id = 0;     // of a message that is announced
  uint64_t bytes = 0;  // of the message; or credit
  uint64_t channel = 0;
  Envelope envelope = {};
};

// Tags: heads of all senders go to one queue, data has its sender and the message's number.
constexpr uint64_t kHeadTag = uint64_t{1} << 63;
uint64_t head_tag(int from) { return kHeadTag | static_cast<uint64_t>(from); }
uint64_t data_tag(int from, uint64_t id) {
  return static_cast<uint64_t>(from) << 40 | (id & ((uint64_t{1} << 40) - 1));
}

uint64_t credit_of(size_t bytes) { return bytes + sizeof(Head); }
std::span<const std::byte> bytes_of(const Head& head) { return std::as_bytes(std::span(&head, 1)); }

class UcxFabric final : public Fabric, private ControlMesh::Owner, private IoLoop::Handler {
 public:
  UcxFabric(const FabricOptions& options, std::unique_ptr<UcxWorker> worker, std::map<int, TlsStream> control,
            const std::vector<FabricAddress>& addresses, Deadline deadline);
  ~UcxFabric() override;

  const char* name() const override { return "ucx"; }
  TransferHandle send(int peer, uint64_t channel, const Envelope& envelope, std::span<const std::byte> data) override;
  TransferHandle receive(int peer, uint64_t channel, std::span<std::byte> into) override;
  bool cancel(const TransferHandle& transfer) override;
  bool withdraw(const TransferHandle& transfer) override;

  void tell(std::span<const int> peers, std::string_view notice) override { mesh_.tell(peers, notice); }
  void on_notice(std::function<void(int, std::string_view)> hear) override { mesh_.on_notice(std::move(hear)); }
  void set_status(const std::array<uint64_t, 8>& status) override { mesh_.set_status(status); }
  Life life(int peer) const override { return mesh_.life(peer); }
  uint32_t events() const override { return mesh_.events().now(); }
  void await_event(uint32_t seen, Deadline deadline) override;
  void wake() override { mesh_.events().add(); }

 private:
  struct Peer {
    bool greeted = false;
    std::string gone;    // why, when it has
    std::string broken;  // what UCX says of its connection, when it does not work any more
    uint64_t next_id = 0;
    uint64_t credit = kCreditBytes;
    uint64_t held = 0, owed = 0;                             // of its credit: held here, and to be given back
    std::unordered_map<uint64_t, TlsTransferPtr> announced;  // sends that wait for its word
    std::vector<TlsTransferPtr> stranded;                    // Note [When UCX notices first]
  };
  // Something that UCX works on. The head of a send lives here.
  struct Flying {
    UcxWorker::Request request = nullptr;
    int peer = -1;
    TlsTransferPtr transfer;  // settled when it ends, if there is one
    std::unique_ptr<Head> head;
    uint64_t id = 0;  // of an announced message that is received
    bool is_cancelled = false;
  };

  // Takes mutex_, before who drives takes it again.
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
  bool take_heads();
  bool end_flights();
  void on_head(int from, const Head& head, std::span<const std::byte> body);
  void begin(const MessagePtr& message);
  void give_credit(int rank, size_t bytes);
  void send_head(int rank, const Head& head, std::span<const std::byte> body = {}, const TlsTransferPtr& transfer = {});
  void send_data(int rank, const TlsTransferPtr& transfer);
  void fly(Flying flying);
  void suspect(int rank, const std::string& why);
  void strand(int rank, const TlsTransferPtr& transfer, const std::string& why);
  void fail_all(int rank, const std::string& why);
  bool take_back(const TlsTransferPtr& transfer);
  void rest();

  // ControlMesh::Owner and IoLoop::Handler: in the mesh's thread.
  bool drained(int rank) override;
  void on_gone(int rank, const Life& life) override;
  void on_ready(uint32_t events) override;

  const FabricOptions options_;
  std::unique_ptr<UcxWorker> worker_;
  const int descriptor_;
  std::map<int, Peer> peers_;
  std::mutex mutex_;
  std::atomic<int> waiting_{0};  // for mutex_
  MessageTable table_;
  std::list<Flying> flying_;
  // The head that is being received. Heads are taken one by one, so that they stay in order.
  UcxWorker::Request arriving_ = nullptr;
  int arriving_from_ = -1;
  std::vector<std::byte> arrived_;
  int drivers_ = 0;
  bool muted_ = false;        // the mesh's thread does not look at the descriptor
  mutable ControlMesh mesh_;  // last: its thread calls the rest
};

UcxFabric::UcxFabric(const FabricOptions& options, std::unique_ptr<UcxWorker> worker, std::map<int, TlsStream> control,
                     const std::vector<FabricAddress>& addresses, Deadline deadline)
    : options_(options),
      worker_(std::move(worker)),
      descriptor_(worker_->descriptor()),
      mesh_(std::move(control), options.keep_alive, *this) {
  const FabricAddress& own = addresses[static_cast<size_t>(options.rank)];
  for (int rank = 0; rank < static_cast<int>(addresses.size()); ++rank) {
    const FabricAddress& other = addresses[static_cast<size_t>(rank)];
    if (other.host == own.host) continue;
    worker_->connect(rank, other.data);
    peers_[rank];
  }
  // That every peer can be reached is found out here, not in the first collective.
  const std::lock_guard lock(mutex_);
  for (auto& [rank, peer] : peers_) send_head(rank, {});
  const auto missing = [&] {
    return std::find_if(peers_.begin(), peers_.end(), [](const auto& one) { return !one.second.greeted; });
  };
  while (missing() != peers_.end()) {
    drive();
    auto hopeless =
        std::find_if(peers_.begin(), peers_.end(), [](const auto& one) { return !one.second.broken.empty(); });
    if (hopeless == peers_.end() && deadline.passed()) hopeless = missing();
    if (hopeless == peers_.end()) continue;
    const auto& [rank, peer] = *hopeless;
    throw CommError(concat("[ucx] no way to rank ", rank, peer.broken.empty() ? "" : ": ", peer.broken,
                           "; do UCX_NET_DEVICES and UCX_TLS name what connects the hosts?"),
                    {options.rank, rank, "", -1});
  }
  rest();
  mesh_.start();
  mesh_.loop().watch(descriptor_, EPOLLIN, *this);
}

UcxFabric::~UcxFabric() {
  {
    const Deadline deadline = within(options_.keep_alive);
    const std::lock_guard lock(mutex_);
    std::vector<UcxWorker::Request> closing;
    const auto is_sending = [](const Flying& flying) {
      return flying.head || (flying.transfer && flying.transfer->is_send);
    };
    while (std::any_of(flying_.begin(), flying_.end(), is_sending) && !deadline.passed()) drive();
    for (const auto& [rank, peer] : peers_) closing.push_back(worker_->disconnect(rank, peer.gone.empty()));
    // Receives that nobody will serve.
    worker_->cancel(arriving_);
    for (const Flying& flying : flying_) worker_->cancel(flying.request);
    while (!deadline.passed()) {
      std::erase_if(closing, [&](auto& one) { return worker_->test(one) != UcxWorker::Status::kPending; });
      end_flights();
      if (closing.empty() && flying_.empty() && worker_->test(arriving_) != UcxWorker::Status::kPending) break;
      worker_->progress();
    }
  }
  mesh_.loop().forget(descriptor_);
  mesh_.leave();
}

UcxFabric::Peer& UcxFabric::peer_of(int rank) {
  const auto found = peers_.find(rank);
  CHORALE_CHECK(found != peers_.end(), "[ucx] rank ", rank, " is not on another host of this job");
  return found->second;
}

// ---- moving

bool UcxFabric::drive() {
  bool moved = false;
  for (int step = 0; step < kStepsPerTurn && worker_->progress(); ++step) moved = true;
  for (auto& [rank, why] : worker_->take_broken()) suspect(rank, why);
  const bool heads = take_heads();
  const bool ended = end_flights();
  if (ended || heads) mesh_.events().add();
  return moved || heads || ended;
}

// Nobody moves it from now on but the mesh's thread, when it is woken.
void UcxFabric::rest() {
  for (int step = 0; step < kStepsPerTurn; ++step) {
    if (worker_->arm()) return;
    drive();
  }
  mesh_.loop().post([this] { on_ready(EPOLLIN); });
}

bool UcxFabric::take_heads() {
  bool any = false;
  for (;;) {
    if (!arriving_) {
      const auto found = worker_->find(kHeadTag, kHeadTag);
      if (!found) return any;
      arriving_from_ = static_cast<int>(found->tag & 0xffffffff);
      arrived_.resize(found->bytes);
      arriving_ = worker_->receive_found(*found, arrived_);
      worker_->progress();
    }
    const auto status = worker_->test(arriving_);
    if (status == UcxWorker::Status::kPending) return any;
    any = true;
    const auto peer = peers_.find(arriving_from_);
    if (status == UcxWorker::Status::kFailed || peer == peers_.end()) continue;
    Head head;
    if (arrived_.size() < sizeof(head)) {
      mesh_.lose(arriving_from_, "it sent a message without a head");
      continue;
    }
    std::memcpy(&head, arrived_.data(), sizeof(head));
    on_head(arriving_from_, head, std::span(arrived_).subspan(sizeof(head)));
  }
}

bool UcxFabric::end_flights() {
  bool any = false;
  for (auto flying = flying_.begin(); flying != flying_.end();) {
    const auto status = worker_->test(flying->request);
    if (status == UcxWorker::Status::kPending) {
      ++flying;
      continue;
    }
    any = true;
    if (flying->transfer) {
      Peer& peer = peer_of(flying->peer);
      if (status == UcxWorker::Status::kDone) {
        flying->transfer->settle(Transfer::State::kDone);
      } else if (flying->is_cancelled || !peer.gone.empty()) {
        flying->transfer->settle(Transfer::State::kFailed, peer.gone.empty() ? "cancelled" : peer.gone);
      } else {
        strand(flying->peer, flying->transfer, "the connection broke");
      }
    }
    flying = flying_.erase(flying);
  }
  return any;
}

void UcxFabric::await_event(uint32_t seen, Deadline deadline) {
  auto& events = mesh_.events();
  if (events.now() != seen) return;
  {
    std::unique_lock lock(mutex_);
    ++drivers_;
    auto idle_since = Clock::now();
    while (events.now() == seen) {
      const bool moved = drive();
      const auto now = Clock::now();
      if (moved) idle_since = now;
      if (now - idle_since > kDriveTime || now >= deadline.end()) break;
      lock.unlock();
      _mm_pause();
      while (waiting_ > 0) std::this_thread::yield();
      lock.lock();
    }
    if (--drivers_ == 0) {
      rest();
      if (std::exchange(muted_, false)) mesh_.loop().change(descriptor_, EPOLLIN, *this);
    }
  }
  events.wait(seen, deadline);
}

void UcxFabric::on_ready(uint32_t) {
  const Turn turn(*this);
  if (drivers_ > 0) {
    muted_ = true;
    mesh_.loop().change(descriptor_, 0, *this);
    return;
  }
  drive();
  rest();
}

// ---- messages

void UcxFabric::fly(Flying flying) {
  if (flying.request) {
    flying_.push_back(std::move(flying));
  } else if (flying.transfer) {
    flying.transfer->settle(Transfer::State::kDone);
  }
}

void UcxFabric::send_head(int rank, const Head& head, std::span<const std::byte> body, const TlsTransferPtr& transfer) {
  Flying flying{nullptr, rank, transfer, std::make_unique<Head>(head)};
  try {
    flying.request = worker_->send(rank, head_tag(options_.rank), bytes_of(*flying.head), body);
  } catch (const std::runtime_error& error) {
    return strand(rank, transfer, error.what());
  }
  fly(std::move(flying));
}

void UcxFabric::send_data(int rank, const TlsTransferPtr& transfer) {
  try {
    fly({worker_->send(rank, data_tag(options_.rank, transfer->id), {}, transfer->data), rank, transfer, {}});
  } catch (const std::runtime_error& error) {
    strand(rank, transfer, error.what());
  }
}

TransferHandle UcxFabric::send(int rank, uint64_t channel, const Envelope& envelope, std::span<const std::byte> data) {
  const auto transfer = std::make_shared<TlsTransfer>();
  transfer->is_send = true;
  transfer->peer = rank;
  transfer->data = data;
  Head head{.kind = HeadKind::kSmall, .bytes = data.size(), .channel = channel, .envelope = envelope};
  const Turn turn(*this);
  Peer& peer = peer_of(rank);
  if (!peer.gone.empty()) {
    transfer->settle(Transfer::State::kFailed, peer.gone);
    return transfer;
  }
  if (data.size() <= kEagerBytes && credit_of(data.size()) <= peer.credit) {
    peer.credit -= credit_of(data.size());
    send_head(rank, head, data, transfer);
    return transfer;
  }
  head.kind = HeadKind::kAnnounce;
  head.id = transfer->id = ++peer.next_id;
  peer.announced.emplace(head.id, transfer);
  send_head(rank, head);
  return transfer;
}

TransferHandle UcxFabric::receive(int rank, uint64_t channel, std::span<std::byte> into) {
  const auto transfer = std::make_shared<TlsTransfer>();
  transfer->peer = rank;
  transfer->channel = channel;
  transfer->into = into;
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
  const TlsTransferPtr transfer = message->transfer;
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
  send_head(rank, {.kind = fits ? HeadKind::kReady : HeadKind::kSkip, .id = message->id});
}

void UcxFabric::give_credit(int rank, size_t bytes) {
  Peer& peer = peer_of(rank);
  peer.held -= credit_of(bytes);
  peer.owed += credit_of(bytes);
  // In portions: a message for each would double their number.
  if (peer.owed >= kCreditBytes / 4) send_head(rank, {.kind = HeadKind::kCredit, .bytes = std::exchange(peer.owed, 0)});
}

void UcxFabric::on_head(int from, const Head& head, std::span<const std::byte> body) {
  Peer& peer = peer_of(from);
  const size_t expected = head.kind == HeadKind::kSmall ? head.bytes : 0;
  if (body.size() != expected || head.bytes > kMostMessageBytes)
    return mesh_.lose(from, "it sent a message that does not fit its head");
  if (head.kind == HeadKind::kSmall || head.kind == HeadKind::kAnnounce) {
    const auto message = std::make_shared<Message>();
    message->source = from;
    message->channel = head.channel;
    message->id = head.id;
    message->is_announced = head.kind != HeadKind::kSmall;
    message->envelope = head.envelope;
    message->bytes = head.bytes;
    if (!message->is_announced) {
      peer.held += credit_of(head.bytes);
      if (peer.held + peer.owed > kCreditBytes) return mesh_.lose(from, "it sent more than it has credit for");
      const TlsTransferPtr transfer = table_.offer(message);
      if (transfer && transfer->into.size() == head.bytes) {
        if (!body.empty()) std::memcpy(transfer->into.data(), body.data(), body.size());
        transfer->settle(Transfer::State::kDone);
        return give_credit(from, head.bytes);
      }
      message->kept.reset(new std::byte[body.size()]);
      if (!body.empty()) std::memcpy(message->kept.get(), body.data(), body.size());
      if (transfer) begin(message);
      return;
    }
    if (table_.offer(message)) begin(message);
    return;
  }
  switch (head.kind) {
    case HeadKind::kHello:
      peer.greeted = true;
      return;
    case HeadKind::kCredit:
      peer.credit += head.bytes;
      if (peer.credit > kCreditBytes) mesh_.lose(from, "it gave more credit than there is");
      return;
    case HeadKind::kWithdraw: {
      if (table_.forget(from, head.id)) return;
      // Somebody is ready for it: nothing has come, so UCX lets go at once.
      const auto flying = std::find_if(flying_.begin(), flying_.end(), [&](const Flying& one) {
        return one.peer == from && one.id == head.id && one.transfer;
      });
      if (flying == flying_.end()) return;
      worker_->cancel(flying->request);
      std::exchange(flying->transfer, nullptr)
          ->settle(Transfer::State::kFailed, concat("rank ", from, " took its message back"));
      return;
    }
    case HeadKind::kReady:
    case HeadKind::kSkip: {
      const auto found = peer.announced.find(head.id);
      if (found == peer.announced.end()) return;  // it was withdrawn
      const TlsTransferPtr transfer = found->second;
      peer.announced.erase(found);
      if (head.kind == HeadKind::kReady) return send_data(from, transfer);
      transfer->settle(Transfer::State::kDone);
      return;
    }
    default:
      return mesh_.lose(from, "it sent a head of an unknown kind");
  }
}

// ---- endings

bool UcxFabric::cancel(const TransferHandle& handle) {
  const auto transfer = std::static_pointer_cast<TlsTransfer>(handle);
  const Turn turn(*this);
  if (!transfer->pending()) return false;
  if (!transfer->is_send && table_.forget(transfer)) {
    transfer->settle(Transfer::State::kFailed, "cancelled");
    return true;
  }
  if (transfer->is_send && peer_of(transfer->peer).announced.erase(transfer->id) > 0) {
    send_head(transfer->peer, {.kind = HeadKind::kWithdraw, .id = transfer->id});
    transfer->settle(Transfer::State::kFailed, "cancelled");
    return true;
  }
  return take_back(transfer);
}

bool UcxFabric::withdraw(const TransferHandle& handle) {
  const auto transfer = std::static_pointer_cast<TlsTransfer>(handle);
  const Turn turn(*this);
  if (!transfer->pending() || !table_.forget(transfer)) return false;
  transfer->settle(Transfer::State::kFailed, "cancelled");
  return true;
}

// From UCX, which has it. It may end well in the meantime; if it does not end, the connection is cut.
bool UcxFabric::take_back(const TlsTransferPtr& transfer) {
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
  const Deadline patience = within(kCancelTime);
  while (transfer->pending() && !patience.passed()) drive();
  if (transfer->pending()) {
    if (const auto request = worker_->disconnect(rank, false)) flying_.push_back({request, rank, nullptr, {}});
    const Deadline limit = within(1s);
    while (transfer->pending() && !limit.passed()) drive();
    CHORALE_INVARIANT(!transfer->pending(), "UCX does not let go of a message");
    suspect(rank, "its connection was cut in the middle of a message that was given up");
  }
  const bool cancelled = transfer->state() == Transfer::State::kFailed;
  // Its bytes may still come: cut off to nothing, which frees their sender.
  if (cancelled && !transfer->is_send && peer_of(rank).gone.empty())
    flying_.push_back({worker_->receive(data_tag(rank, id), {}), rank, nullptr, {}, id});
  if (drivers_ == 0) rest();
  return cancelled;
}

void UcxFabric::suspect(int rank, const std::string& why) {
  const auto found = peers_.find(rank);
  if (found == peers_.end() || !found->second.broken.empty()) return;
  found->second.broken = why;
  mesh_.suspect(rank, why);
}

void UcxFabric::strand(int rank, const TlsTransferPtr& transfer, const std::string& why) {
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
  if (const auto request = worker_->disconnect(rank, false)) flying_.push_back({request, rank, nullptr, {}});
  fail_all(rank, life.text);
  if (drivers_ == 0) rest();
}

void UcxFabric::fail_all(int rank, const std::string& why) {
  for (const TlsTransferPtr& transfer : table_.forget_peer(rank)) transfer->settle(Transfer::State::kFailed, why);
  for (const auto& [id, transfer] : std::exchange(peer_of(rank).announced, {}))
    transfer->settle(Transfer::State::kFailed, why);
  for (const TlsTransferPtr& transfer : std::exchange(peer_of(rank).stranded, {}))
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

// UCX only warns of a device that is not there, and then finds no way to anybody.
const std::string& checked_device(const std::string& list) {
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const std::string device = list.substr(begin, end - begin), name = device.substr(0, device.find(':'));
    std::error_code ignored;
    CHORALE_CHECK(!name.empty() && (std::filesystem::exists("/sys/class/net/" + name, ignored) ||
                                    std::filesystem::exists("/sys/class/infiniband/" + name, ignored)),
                  "[ucx] there is no network device '", device, "' here: neither in /sys/class/net nor in ",
                  "/sys/class/infiniband");
    begin = end + 1;
  }
  return list;
}

class UcxFabricBuilder final : public FabricBuilder {
 public:
  UcxFabricBuilder(const FabricOptions& options, const std::string& own_address, const std::string& device)
      : options_(options), join_(options, own_address), worker_(Ucx::get().make_worker(checked_device(device))) {
    CHORALE_CHECK(!options.checksum && !options.chaos,
                  "[ucx] UCX moves its own bytes: there are no checksums and no faults on purpose over it");
  }
  FabricAddress address() override { return {0, join_.endpoint(), worker_->address()}; }
  std::unique_ptr<Fabric> connect(const std::vector<FabricAddress>& addresses, Deadline deadline) override {
    std::map<int, TlsStream> control;
    for (auto& [rank, streams] : join_.meet(addresses, 1, deadline)) control.emplace(rank, std::move(streams.front()));
    return std::make_unique<UcxFabric>(options_, std::move(worker_), std::move(control), addresses, deadline);
  }

 private:
  const FabricOptions options_;
  TlsJoin join_;
  std::unique_ptr<UcxWorker> worker_;
};

}  // namespace

Ucx& Ucx::get() {
  static auto* const ucx = static_cast<Ucx*>(load_module(kUcxModule));
  return *ucx;
}

std::unique_ptr<FabricBuilder> make_ucx_fabric(const FabricOptions& options, const std::string& own_address,
                                               const std::string& device) {
  return std::make_unique<UcxFabricBuilder>(options, own_address, device);
}

}  // namespace chorale::transport
