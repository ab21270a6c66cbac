#include "chorale/comm/shm/shm_messages.h"

#include <algorithm>
#include <cstring>

#include "chorale/base/crc32c.h"
#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

using shm::Message;
using shm::MessageKind;
using shm::Place;
using shm::PlaceKind;
using What = transport::ChaosFault::What;

// Small messages that nobody asks for are kept up to this total; then their sender has to wait.
constexpr size_t kMostEarlyBytes = size_t{256} << 20;

}  // namespace

ShmMessages::ShmMessages(ShmGroup& group) : group_(group), early_(static_cast<size_t>(group.size)) {}

void ShmMessages::submit(const Intrusive<Operation>& operation) {
  (operation->kind == CallKind::kSend ? sending_ : posted_).push_back(operation);
}

std::vector<Intrusive<Operation>> ShmMessages::abandon() {
  std::vector<Intrusive<Operation>> all(sending_.begin(), sending_.end());
  for (const Exposed& exposed : exposed_) {
    all.push_back(exposed.operation);
    if (exposed.scratch.data) group_.context().scratch().deallocate(exposed.scratch);
  }
  all.insert(all.end(), posted_.begin(), posted_.end());
  all.insert(all.end(), finished_.begin(), finished_.end());
  sending_.clear();
  exposed_.clear();
  posted_.clear();
  answers_.clear();
  finished_.clear();
  return all;
}

Intrusive<Operation> ShmMessages::pending() const {
  if (!exposed_.empty()) return exposed_.front().operation;
  if (!posted_.empty()) return posted_.front();
  return sending_.empty() ? Intrusive<Operation>() : sending_.front();
}

bool ShmMessages::room_to(int peer) const {
  const shm::Mailbox& box = group_.segment.mailbox(group_.rank, peer);
  return box.filled.load(std::memory_order_relaxed) - box.emptied.load(std::memory_order_acquire) <
         shm::kMessagesInFlight;
}
Message& ShmMessages::next_to(int peer) const {
  shm::Mailbox& box = group_.segment.mailbox(group_.rank, peer);
  return box.ring[box.filled.load(std::memory_order_relaxed) % shm::kMessagesInFlight];
}
void ShmMessages::fill(int peer) {
  Message& message = next_to(peer);
  message.check = message.right_check();
  if (group_.context().chaos) [[unlikely]]
    group_.context().chaos->touch(What::kControl, {reinterpret_cast<std::byte*>(&message.id), 4 * sizeof(uint64_t)});
  std::atomic<uint32_t>& filled = group_.segment.mailbox(group_.rank, peer).filled;
  group_.segment.publish(filled, filled.load(std::memory_order_relaxed) + 1);
}

void ShmMessages::start_send(const Intrusive<Operation>& operation) {
  const Chunk& chunk = operation->give[0];
  const int to = operation->peer;
  Message& message = next_to(to);
  message.dtype = static_cast<uint32_t>(operation->dtype);
  message.tag = operation->tag;
  message.bytes = chunk.bytes;
  message.id = next_id_++;
  message.has_crc = group_.context().checksum ? 1 : 0;
  message.crc = message.has_crc != 0 ? crc32c({chunk.data, chunk.bytes}) : 0;
  transport::Chaos* chaos = group_.context().chaos.get();
  if (chunk.bytes <= shm::kMessageInlineBytes) {
    message.kind = MessageKind::kInline;
    if (chunk.bytes > 0) std::memcpy(message.data, chunk.data, chunk.bytes);
    if (chaos) chaos->touch(What::kPayload, {message.data, chunk.bytes});
    fill(to);
    finished_.push_back(operation);  // the caller may have its buffer back
    return;
  }
  message.kind = MessageKind::kReady;
  Exposed exposed{operation, message.id, {}};
  if (const auto place = chaos ? std::nullopt : group_.place_of(chunk)) {
    message.place = *place;
  } else {
    CachingAllocator& scratch = group_.context().scratch();
    exposed.scratch = scratch.allocate(chunk.bytes);
    std::memcpy(exposed.scratch.data, chunk.data, chunk.bytes);
    if (chaos) chaos->touch(What::kPayload, {exposed.scratch.data, chunk.bytes});
    message.place = Place::make(PlaceKind::kScratch, scratch.locate(exposed.scratch.data)->source_offset());
  }
  exposed_.push_back(std::move(exposed));
  fill(to);
}

void ShmMessages::end_exposure(int from, uint64_t id) {
  const auto found = std::find_if(exposed_.begin(), exposed_.end(), [&](const Exposed& exposed) {
    return exposed.id == id && exposed.operation->peer == from;
  });
  CHORALE_INVARIANT(found != exposed_.end(), "rank ", from, " took message ", id, ", which is not there");
  if (found->scratch.data) group_.context().scratch().deallocate(found->scratch);
  finished_.push_back(found->operation);
  exposed_.erase(found);
}

void ShmMessages::send_all() {
  while (!answers_.empty() && room_to(answers_.front().to)) {
    Message& message = next_to(answers_.front().to);
    message.kind = MessageKind::kTaken;
    message.id = answers_.front().id;
    fill(answers_.front().to);
    answers_.pop_front();
  }
  // Messages to one rank keep their order; a full mailbox holds up nobody else's.
  SmallVector<int, 8> full;
  for (auto at = sending_.begin(); at != sending_.end();) {
    const int to = (*at)->peer;
    if (std::find(full.begin(), full.end(), to) != full.end() || !room_to(to)) {
      full.push_back(to);
      ++at;
      continue;
    }
    start_send(*at);
    at = sending_.erase(at);
  }
}

void ShmMessages::deliver(Operation& receive, int from, const Early& message, const std::byte* inline_data) {
  const Chunk& to = receive.take[0];
  if (message.bytes != to.bytes || message.dtype != receive.dtype)
    raise_misfit(group_.membership, from, message.bytes, message.dtype, receive);
  if (group_.context().checksum && !message.crc) {
    throw CallFailed{concat("rank ", group_.global(from), " sends without checksums, and rank ",
                            group_.global(group_.rank), " wants them: CHORALE_CHECKSUM differs"),
                     group_.global(from)};
  }
  const auto verify = [&] {
    if (message.crc && crc32c({to.data, to.bytes}) != *message.crc) raise_damage(group_, from, "a message");
  };
  receive.source = from;
  if (message.kind == MessageKind::kInline) {
    if (to.bytes > 0) std::memcpy(to.data, inline_data, to.bytes);
    return verify();
  }
  {
    const Hands hands(group_);
    check_not_failed(group_);
    const std::byte* data = group_.reach(from, message.place, to.bytes);
    constexpr size_t kStep = 256 << 10;
    for (size_t at = 0; at < to.bytes; at += kStep) {
      std::memcpy(to.data + at, data + at, std::min(kStep, to.bytes - at));
      check_not_failed(group_);
    }
  }
  verify();
  answers_.push_back({from, message.id});
}

int ShmMessages::early_sender(const Operation& receive) const {
  for (int from = 0; from < group_.size; ++from) {
    if (receive.peer >= 0 && receive.peer != from) continue;
    const auto& messages = early_[static_cast<size_t>(from)];
    if (std::any_of(messages.begin(), messages.end(), [&](const Early& early) { return early.tag == receive.tag; }))
      return from;
  }
  return -1;
}

bool ShmMessages::match_early(Operation& receive) {
  const int from = early_sender(receive);
  if (from < 0) return false;
  auto& messages = early_[static_cast<size_t>(from)];
  const auto found =
      std::find_if(messages.begin(), messages.end(), [&](const Early& early) { return early.tag == receive.tag; });
  deliver(receive, from, *found, found->data.data());
  early_bytes_ -= found->data.size();
  messages.erase(found);
  return true;
}

void ShmMessages::empty_mailbox(int from) {
  shm::Mailbox& box = group_.segment.mailbox(from, group_.rank);
  for (;;) {
    const uint32_t emptied = box.emptied.load(std::memory_order_relaxed);
    if (box.filled.load(std::memory_order_acquire) == emptied) return;
    const Message& message = box.ring[emptied % shm::kMessagesInFlight];
    if (message.check != message.right_check()) [[unlikely]]
      raise_damage(group_, from, "a message's head");
    if (message.kind == MessageKind::kTaken) {
      end_exposure(from, message.id);
    } else {
      CHORALE_INVARIANT(message.dtype < kDTypeCount, "message of dtype ", message.dtype);
      Early early{.kind = message.kind,
                  .dtype = static_cast<DType>(message.dtype),
                  .id = message.id,
                  .tag = message.tag,
                  .bytes = message.bytes,
                  .place = message.place,
                  .crc = message.has_crc != 0 ? std::optional(message.crc) : std::nullopt,
                  .data = {}};
      const bool is_inline = message.kind == MessageKind::kInline;
      CHORALE_INVARIANT(!is_inline || message.bytes <= shm::kMessageInlineBytes, "message of ", message.bytes);
      const auto wanted = std::find_if(posted_.begin(), posted_.end(), [&](const auto& receive) {
        return (receive->peer < 0 || receive->peer == from) && receive->tag == message.tag;
      });
      if (wanted != posted_.end()) {
        deliver(**wanted, from, early, message.data);
        finished_.push_back(*wanted);
        posted_.erase(wanted);
      } else {
        if (is_inline) {
          if (early_bytes_ > kMostEarlyBytes) return;
          early.data.assign(message.data, message.data + message.bytes);
          early_bytes_ += early.data.size();
        }
        early_[static_cast<size_t>(from)].push_back(std::move(early));
      }
    }
    group_.segment.publish(box.emptied, emptied + 1);
  }
}

bool ShmMessages::has_message(const Operation& receive) {
  for (int from = 0; from < group_.size; ++from) empty_mailbox(from);
  return early_sender(receive) >= 0;
}

bool ShmMessages::take_message(Operation& receive) {
  const bool found = match_early(receive);
  if (!answers_.empty()) send_all();
  return found;
}

void ShmMessages::progress(std::vector<Intrusive<Operation>>& done) {
  // Also when another message fails.
  struct HandOver {
    std::vector<Intrusive<Operation>>&from, &to;
    ~HandOver() {
      to.insert(to.end(), from.begin(), from.end());
      from.clear();
    }
  } const hand_over{finished_, done};
  send_all();
  for (auto at = posted_.begin(); at != posted_.end();) {
    if (match_early(**at)) {
      finished_.push_back(*at);
      at = posted_.erase(at);
    } else {
      ++at;
    }
  }
  if (!posted_.empty() || !exposed_.empty() || !sending_.empty()) {
    for (int from = 0; from < group_.size; ++from) empty_mailbox(from);
  }
  if (!answers_.empty()) send_all();
}

}  // namespace chorale::comm
