#include "chorale/comm/mpi/mpi_messages.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/comm/failure.h"

namespace chorale::comm {
namespace {

// Up to here data travels with its header.
constexpr size_t kMostBytesBehindHeader = 4 << 10;
// Tags of data are used again after so many messages between two ranks.
constexpr int kDataTags = 1 << 20;

}  // namespace

void MpiMessages::submit(const base::Intrusive<Operation>& operation) {
  if (operation->kind == CallKind::kSend) return send(operation);
  const auto found = std::find_if(early_.begin(), early_.end(), [&](const Early& early) {
    return (operation->peer < 0 || operation->peer == early.from) && header_of(early.message).tag == operation->tag;
  });
  if (found == early_.end()) {
    posted_.push_back(operation);
    return;
  }
  const Early early = std::move(*found);
  early_.erase(found);
  deliver(operation, early.from, early.message);
}

template <class Start>
void MpiMessages::in_pieces(Moving& moving, const Chunk& chunk, const Start& start) const {
  for (size_t at = 0; at < chunk.bytes; at += transport::Mpi::kMostBytes)
    moving.requests.push_back(start(chunk.data + at, std::min(transport::Mpi::kMostBytes, chunk.bytes - at)));
}

void MpiMessages::send(const base::Intrusive<Operation>& operation) {
  const Chunk& chunk = operation->give[0];
  Header header{.tag = operation->tag, .bytes = chunk.bytes, .dtype = static_cast<uint32_t>(operation->dtype)};
  const bool behind = chunk.bytes <= kMostBytesBehindHeader;
  const int to = operation->peer;
  if (!behind) {
    int& next = next_tags_[static_cast<size_t>(to)];
    header.data_tag = next++;
    if (next == kFirstDataTag + kDataTags) next = kFirstDataTag;
  }
  Moving& moving = moving_.emplace_back(Moving{operation, {}, {}});
  moving.header.resize(sizeof(header) + (behind ? chunk.bytes : 0));
  std::memcpy(moving.header.data(), &header, sizeof(header));
  if (behind && chunk.bytes > 0) std::memcpy(moving.header.data() + sizeof(header), chunk.data, chunk.bytes);
  moving.requests.push_back(group_.mpi.send(group_.comm, to, kHeaderTag, moving.header.data(), moving.header.size()));
  if (behind) return;
  in_pieces(moving, chunk, [&](std::byte* data, size_t bytes) {
    return group_.mpi.send(group_.comm, to, header.data_tag, data, bytes);
  });
}

MpiMessages::Header MpiMessages::header_of(const std::vector<std::byte>& message) {
  Header header;
  CHORALE_INVARIANT(message.size() >= sizeof(header), "a message of ", message.size(), " bytes has no header");
  std::memcpy(&header, message.data(), sizeof(header));
  CHORALE_INVARIANT(
      header.dtype < kDTypeCount && (header.data_tag != 0 || message.size() == sizeof(header) + header.bytes),
      "the header of a message is damaged");
  return header;
}

void MpiMessages::deliver(const base::Intrusive<Operation>& receive, int from, const std::vector<std::byte>& message) {
  const Header header = header_of(message);
  const Chunk& to = receive->take[0];
  const auto dtype = static_cast<DType>(header.dtype);
  Moving& moving = moving_.emplace_back(Moving{receive, {}, {}});
  if (header.bytes != to.bytes || dtype != receive->dtype)
    raise_misfit(group_.membership, from, header.bytes, dtype, *receive);
  receive->source = from;
  if (header.data_tag == 0) {
    if (to.bytes > 0) std::memcpy(to.data, message.data() + sizeof(header), to.bytes);
    return;
  }
  in_pieces(moving, to, [&](std::byte* data, size_t bytes) {
    return group_.mpi.receive(group_.comm, from, header.data_tag, data, bytes);
  });
}

void MpiMessages::collect() {
  while (!posted_.empty()) {
    const auto found = group_.mpi.find(group_.comm, transport::Mpi::kAnySource, kHeaderTag);
    if (!found) return;
    Early early{found->source, std::vector<std::byte>(found->bytes)};
    // It is small and there.
    auto request = group_.mpi.receive_found(*found, early.message.data());
    while (!group_.mpi.test(request)) {
    }
    const uint64_t tag = header_of(early.message).tag;
    const auto wanted = std::find_if(posted_.begin(), posted_.end(), [&](const auto& receive) {
      return (receive->peer < 0 || receive->peer == early.from) && receive->tag == tag;
    });
    if (wanted == posted_.end()) {
      early_.push_back(std::move(early));
      continue;
    }
    const base::Intrusive<Operation> receive = *wanted;
    posted_.erase(wanted);
    deliver(receive, early.from, early.message);
  }
}

void MpiMessages::progress(std::vector<base::Intrusive<Operation>>& done) {
  collect();
  for (auto moving = moving_.begin(); moving != moving_.end();) {
    std::erase_if(moving->requests, [&](transport::Mpi::Request& request) { return group_.mpi.test(request); });
    if (!moving->requests.empty()) {
      ++moving;
      continue;
    }
    done.push_back(moving->operation);
    moving = moving_.erase(moving);
  }
}

base::Intrusive<Operation> MpiMessages::pending() const {
  if (!moving_.empty()) return moving_.front().operation;
  return posted_.empty() ? base::Intrusive<Operation>() : posted_.front();
}

std::vector<base::Intrusive<Operation>> MpiMessages::abandon() {
  std::vector<base::Intrusive<Operation>> all(posted_.begin(), posted_.end());
  for (const Moving& moving : moving_) all.push_back(moving.operation);
  posted_.clear();
  // Kept for ever on purpose: see Note [Calls over MPI].
  static std::list<Moving>& kept = *new std::list<Moving>;
  std::erase_if(moving_, [](const Moving& moving) { return moving.requests.empty(); });
  kept.splice(kept.end(), moving_);
  return all;
}

}  // namespace chorale::comm
