#include "chorale/rpc/post.h"

#include <tuple>

#include "chorale/base/log.h"
#include "chorale/base/rpc_error.h"
#include "chorale/comm/lent_parcels.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kMostBytes = uint64_t{1} << 40;
// Nobody asks for an answer in less time than a transfer may take; a receiver that is gone ends it at once.
constexpr auto kTransferTime = 10min;

const comm::ParcelOptions kParcel{.timeout = kTransferTime, .most_bytes = kMostBytes};

}  // namespace

struct Post::Link {
  Link(comm::Group pair, int whom, uint64_t number) : group(std::move(pair)), worker(whom), ticket(number) {}
  const comm::Group group;
  const int worker;
  const uint64_t ticket;
  std::atomic<bool> closes{false};
  std::thread thread{};

  int peer() const { return group.global_rank(1 - group.rank()); }
  void close() {
    if (!thread.joinable()) return;
    closes = true;
    try {
      std::ignore =
          group.send_parcel(Tensor::empty({0}, DType::kU8), group.global_rank(group.rank()), kMessages, kParcel);
    } catch (const CommError&) {  // NOLINT(bugprone-empty-catch): broken, so nothing blocks
    }
    thread.join();
  }
};

Post::Post(comm::Group group) : group_(std::move(group)) { work_ = receive(); }

Post::~Post() {
  for (const auto& [worker, link] : links_) link->close();
  for (const auto& link : dropped_) link->close();
}

// ---- links

std::shared_ptr<Post::Link> Post::add_link(int worker, uint64_t ticket, comm::Group pair) {
  auto link = std::make_shared<Link>(std::move(pair), worker, ticket);
  std::deque<std::shared_ptr<Link>> ended;  // outside the lock
  {
    const std::lock_guard lock(mutex_);
    has_links_ = true;
    std::shared_ptr<Link>& entry = links_[worker];
    if (entry) dropped_.push_back(std::move(entry));
    entry = link;
    ended.swap(dropped_);
  }
  for (const auto& old : ended) old->close();
  return link;
}

void Post::open(const std::shared_ptr<Link>& link) {
  const std::lock_guard lock(mutex_);
  link->thread = std::thread([this, raw = link.get()] { read_link(*raw); });
}

void Post::drop_link(int worker, uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  const auto found = links_.find(worker);
  if (found == links_.end() || found->second->ticket != ticket) return;
  dropped_.push_back(std::move(found->second));
  links_.erase(found);
}

void Post::read_link(Link& link) {
  while (!link.closes) {
    Arrival arrival{.from = link.worker, .ticket = link.ticket};
    bool is_over = false;
    try {
      const comm::Work work = link.group.receive_parcel(comm::kAnySource, kMessages, kParcel);
      work.wait();
      const Tensor parcel = work.result()[0];
      if (parcel.elems() == 0) continue;  // from close()
      arrival.message = complete(link.group, link.peer(), Incoming(parcel));
    } catch (const InvalidArgument& error) {
      log_warning(concat("[rpc] worker ", link.worker, " sent something that is no message: ", error.what()));
      continue;
    } catch (const CommError& error) {
      is_over = error.failure().peer >= 0 || link.group.is_broken();
      if (!is_over) continue;  // nothing came for a while
      arrival.reason = error.what();
    }
    if (link.closes) return;
    {
      const std::lock_guard lock(mutex_);
      arrivals_.push_back(std::move(arrival));
    }
    wake();
    if (is_over) return;
  }
}

std::optional<Arrival> Post::take_from_links() {
  if (!has_links_) return std::nullopt;
  const std::lock_guard lock(mutex_);
  if (arrivals_.empty()) return std::nullopt;
  std::optional<Arrival> arrival(std::move(arrivals_.front()));
  arrivals_.pop_front();
  return arrival;
}

// ---- messages

comm::Work Post::receive() const { return group_.receive_parcel(comm::kAnySource, kMessages, kParcel); }

void Post::send(int to, const Message& message) {
  const uint64_t tag = ++tags_ | comm::kLentTag;
  const Outgoing outgoing = pack(message, tag);
  std::shared_ptr<Link> link;
  if (has_links_) {
    const std::lock_guard lock(mutex_);
    const auto found = links_.find(to);
    if (found == links_.end())
      throw RpcError(RpcErrorKind::kConnection, to, concat("[rpc] worker ", to, " is not in the group any more"));
    link = found->second;
  }
  const comm::Group& group = link ? link->group : group_;
  try {
    const int rank = link ? link->peer() : group.global_rank(to);
    for (const Tensor& bytes : outgoing.apart) std::ignore = group.send_parcel(bytes, rank, tag, kParcel);
    std::ignore = group.send_parcel(outgoing.parcel, rank, kMessages, kParcel);
  } catch (const CommError& error) {
    throw RpcError(RpcErrorKind::kConnection, to, error.what());
  }
}

Post::Receiving Post::receiving() const {
  const std::lock_guard lock(mutex_);
  return {work_, number_};
}

std::optional<Arrival> Post::take() {
  if (auto arrival = take_from_links()) return arrival;
  const Receiving now = receiving();
  if (!now.work.is_completed()) return std::nullopt;
  return take(now, Deadline::never());
}

std::optional<Arrival> Post::take(const Receiving& next, Deadline deadline) {
  if (auto linked = take_from_links()) return linked;
  Arrival arrival;
  Tensor parcel;
  try {
    next.work.synchronize(deadline);
    arrival.from = group_.group_rank(next.work.source_rank());
    parcel = next.work.result()[0];
  } catch (const CommError& error) {
    arrival.from = error.failure().peer < 0 ? -1 : group_.group_rank(error.failure().peer);
    arrival.reason = error.what();
  }
  {
    const std::lock_guard lock(mutex_);
    if (number_ != next.number) return std::nullopt;
    if (group_.is_broken()) return Arrival{.from = -1, .reason = std::move(arrival.reason)};
    ++number_;
    work_ = receive();
  }
  if (!parcel.defined()) return arrival.from < 0 ? std::nullopt : std::optional(std::move(arrival));
  if (parcel.elems() == 0) return take_from_links();  // from wake()
  try {
    arrival.message = complete(group_, group_.global_rank(arrival.from), Incoming(parcel));
  } catch (const InvalidArgument& error) {
    log_warning(concat("[rpc] worker ", arrival.from, " sent something that is no message: ", error.what()));
    return std::nullopt;
  } catch (const CommError& error) {
    // It ended while it sent; that it is gone comes by itself.
    log_warning(concat("[rpc] a message from worker ", arrival.from, " has come in part: ", error.what()));
    return std::nullopt;
  }
  return arrival;
}

Message Post::complete(const comm::Group& group, int rank, Incoming incoming) {
  std::vector<Tensor> apart;
  for (const size_t bytes : incoming.apart()) {
    const comm::Work work = group.receive_parcel(rank, incoming.tag(), {.timeout = kTransferTime, .most_bytes = bytes});
    work.wait();
    apart.push_back(work.result()[0]);
  }
  return incoming.unpack(apart);
}

void Post::wake() {
  try {
    std::ignore =
        group_.send_parcel(Tensor::empty({0}, DType::kU8), group_.global_rank(group_.rank()), kMessages, kParcel);
  } catch (const CommError&) {
    // Broken: take() does not block then.
  }
}

}  // namespace chorale::rpc
