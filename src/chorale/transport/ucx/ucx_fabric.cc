// The ucx fabric from its beginning to its end: connecting, moving, leaving.
#include "chorale/transport/ucx/ucx_fabric.h"

#include <immintrin.h>
#include <sys/epoll.h>

#include <algorithm>
#include <filesystem>
#include <thread>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/base/shared_object.h"
#include "chorale/transport/congestion.h"
#include "chorale/transport/keep_alive.h"
#include "chorale/transport/tls/tls_join.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// After this long without anything moving, a waiting thread leaves it to the mesh's thread.
constexpr Clock::duration kDriveTime = 100us;
// After so many steps others have their turn. A step may move half a MiB.
constexpr int kStepsPerTurn = 32;
constexpr int kTurnsBeforeRest = 4;

}  // namespace

UcxFabric::UcxFabric(const FabricOptions& options, std::unique_ptr<UcxWorker> worker, std::map<int, TlsStream> control,
                     const std::vector<FabricAddress>& addresses, Deadline deadline)
    : MeshFabric(options, std::move(control)), worker_(std::move(worker)), descriptor_(worker_->descriptor()) {
  const FabricAddress& own = addresses[static_cast<size_t>(options.rank)];
  for (int rank = 0; rank < static_cast<int>(addresses.size()); ++rank) {
    const FabricAddress& other = addresses[static_cast<size_t>(rank)];
    if (other.host == own.host) continue;
    worker_->connect(rank, other.data);
    peers_[rank];
  }
  // A peer that cannot be reached is found out here, not in the first collective.
  const std::lock_guard lock(mutex_);
  for (auto& [rank, peer] : peers_) send_frame(rank, make_frame(FrameKind::kHello, 0, 0));
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
    const std::lock_guard lock(mutex_);
    const auto is_sending = [](const Flying& flying) {
      return flying.frame || (flying.transfer && flying.transfer->is_send);
    };
    // A peer that is stopped takes nothing any more; it is not waited for. One that lives takes everything, and must:
    // Note [Both must not cut].
    Deadline deadline = within(kLeavingTime);
    while (std::any_of(flying_.begin(), flying_.end(), is_sending) && !deadline.passed()) drive();
    std::vector<UcxWorker::Request> flushing;
    for (const auto& [rank, peer] : peers_) flushing.push_back(worker_->flush(rank));
    const auto has_ended = [&](auto& request) { return worker_->test(request) != UcxWorker::Status::kPending; };
    while (std::erase_if(flushing, has_ended), !flushing.empty() && !deadline.passed()) drive();
    for (auto& [rank, peer] : peers_) {
      if (peer.gone.empty()) peer.gone = "this rank has left";
      fly({worker_->disconnect(rank), rank});
    }
    // Receives that nobody will serve.
    worker_->cancel(arriving_);
    for (const Flying& flying : flying_) worker_->cancel(flying.request);
    deadline = within(std::min(options_.keep_alive, kLeavingTime));
    while (!deadline.passed()) {
      end_flights();
      std::erase_if(flushing, has_ended);
      if (flying_.empty() && flushing.empty() && has_ended(arriving_)) break;
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
  const bool frames = take_frames();
  const bool ended = end_flights();
  if (ended || frames) mesh_.events().add();
  return moved || frames || ended;
}

// Leaves the worker to the mesh's thread, which alone moves it from now on, when it is woken.
void UcxFabric::rest() {
  for (int turn = 0; turn < kTurnsBeforeRest; ++turn) {
    if (worker_->arm()) return;
    drive();
  }
  mesh_.loop().post([this] { on_ready(EPOLLIN); });
}

bool UcxFabric::take_frames() {
  bool any = false;
  for (;;) {
    if (!arriving_) {
      const auto found = worker_->find(kFrameTag, kFrameTag);
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
    // Behind a frame that was damaged, the next one must not be taken for it.
    if (peer->second.accused) continue;
    try {
      CHORALE_CHECK(arrived_.size() >= kFrameBytes, "a message of ", arrived_.size(), " bytes is no frame");
      const auto bytes = std::span<const std::byte>(arrived_);
      on_frame(arriving_from_, parse_frame(bytes.first<kFrameBytes>()), bytes.subspan(kFrameBytes));
    } catch (const InvalidArgument& error) {
      accuse(arriving_from_, error.what());
    }
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
        land(*flying);
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

void UcxFabric::land(Flying& flying) {
  try {
    if (const MessagePtr& message = flying.transfer->message; message && message->checksum)
      check_checksum(*message->checksum, crc32c(flying.transfer->into), flying.peer);
    flying.transfer->settle(Transfer::State::kDone);
  } catch (const InvalidArgument& error) {
    peer_of(flying.peer).stranded.push_back(flying.transfer);
    accuse(flying.peer, error.what());
  }
}

void UcxFabric::accuse(int rank, const std::string& why) {
  Peer& peer = peer_of(rank);
  peer.broken = why;
  peer.accused = true;
  mesh_.lose(rank, why);
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

// ---- building

namespace {

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

// UCX listens as soon as there is a worker, and connections to it get what its listener has; of the connections that
// it opens itself nothing can be chosen (Note [Congestion control]).
std::unique_ptr<UcxWorker> make_worker(const FabricOptions& options, const std::string& device) {
  const std::vector<Listener> before = tcp_listeners();
  auto worker = Ucx::get().make_worker(checked_device(device));
  for (const auto& [descriptor, address] : tcp_listeners()) {
    const auto is_same = [descriptor = descriptor](const Listener& old) { return old.descriptor == descriptor; };
    if (std::none_of(before.begin(), before.end(), is_same))
      choose_congestion_control(descriptor, address, options.congestion);
  }
  return worker;
}

class UcxFabricBuilder final : public FabricBuilder {
 public:
  UcxFabricBuilder(const FabricOptions& options, const std::string& own_address, const std::string& device)
      : options_(options), join_(options, own_address), worker_(make_worker(options, device)) {}
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
  static auto* const ucx = static_cast<Ucx*>(load_shared_object(kUcxObject));
  return *ucx;
}

std::unique_ptr<FabricBuilder> make_ucx_fabric(const FabricOptions& options, const std::string& own_address,
                                               const std::string& device) {
  return std::make_unique<UcxFabricBuilder>(options, own_address, device);
}

}  // namespace chorale::transport
