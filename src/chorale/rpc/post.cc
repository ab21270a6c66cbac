#include "chorale/rpc/post.h"

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

Post::Post(comm::Group group) : group_(std::move(group)), rank_(group_.rank()), size_(group_.size()) {
  work_ = receive();
}

comm::Work Post::receive() const { return group_.receive_parcel(comm::kAnySource, kMessages, kParcel); }

void Post::send(int to, const Message& message) {
  const uint64_t tag = ++tags_ | comm::kLentTag;
  const Outgoing outgoing = pack(message, tag);
  const int rank = group_.global_rank(to);
  try {
    for (const Tensor& bytes : outgoing.apart) group_.send_parcel(bytes, rank, tag, kParcel);
    group_.send_parcel(outgoing.parcel, rank, kMessages, kParcel);
  } catch (const CommError& error) {
    throw RpcError(RpcErrorKind::kConnection, to, error.what());
  }
}

Post::Receiving Post::receiving() const {
  const std::lock_guard lock(mutex_);
  return {work_, number_};
}

std::optional<Arrival> Post::take() {
  const Receiving now = receiving();
  if (!now.work.is_completed()) return std::nullopt;
  return take(now, Deadline::never());
}

std::optional<Arrival> Post::take(const Receiving& next, Deadline deadline) {
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
    if (group_.is_broken()) return Arrival{-1, {}, std::move(arrival.reason)};
    ++number_;
    work_ = receive();
  }
  if (!parcel.defined()) return arrival.from < 0 ? std::nullopt : std::optional(std::move(arrival));
  if (parcel.elems() == 0) return std::nullopt;  // from wake()
  try {
    arrival.message = complete(arrival.from, Incoming(parcel));
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

Message Post::complete(int from, Incoming incoming) const {
  std::vector<Tensor> apart;
  for (const size_t bytes : incoming.apart()) {
    const comm::Work work = group_.receive_parcel(group_.global_rank(from), incoming.tag(),
                                                  {.timeout = kTransferTime, .most_bytes = bytes});
    work.wait();
    apart.push_back(work.result()[0]);
  }
  return incoming.unpack(apart);
}

void Post::wake() {
  try {
    group_.send_parcel(Tensor::empty({0}, DType::kU8), group_.global_rank(rank_), kMessages, kParcel);
  } catch (const CommError&) {
    // Broken: take() does not block then.
  }
}

}  // namespace chorale::rpc
