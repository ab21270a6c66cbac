#include "chorale/comm/messages.h"

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

Messages::Messages(ShmGroup& group) : group_(group), early_(static_cast<size_t>(group.size)) {}

void Messages::submit(const Intrusive<Operation>& operation) {
  (operation->kind == CallKind::kSend ? sending_ : posted_).push_back(operation);
}

std::vector<Intrusive<Operation>> Messages::abandon() {
  std::vector<Intrusive<Operation>> all(sending_.begin(), sending_.end());
  all.insert(all.end(), unanswered_.begin(), unanswered_.end());
  all.insert(all.end(), posted_.begin(), posted_.end());
  sending_.clear();
  unanswered_.clear();
  posted_.clear();
  answers_.clear();
  return all;
}

Intrusive<Operation> Messages::pending() const {
  if (!unanswered_.empty()) return unanswered_.front();
  if (!posted_.empty()) return posted_.front();
  return sending_.empty() ? Intrusive<Operation>() : sending_.front();
}

std::vector<int> Messages::answered() const {
  std::vector<int> ranks;
  for (const Answer& answer : answers_) ranks.push_back(answer.to);
  return ranks;
}
void Messages::drop_answers_to(const std::vector<int>& ranks) {
  std::erase_if(answers_,
                [&](const Answer& answer) { return std::find(ranks.begin(), ranks.end(), answer.to) != ranks.end(); });
}

bool Messages::room_to(int peer) const {
  const shm::Mailbox& box = group_.segment.mailbox(group_.rank, peer);
  return box.filled.load(std::memory_order_relaxed) - box.emptied.load(std::memory_order_acquire) <
         shm::kMessagesInFlight;
}
Message& Messages::next_to(int peer) const {
  shm::Mailbox& box = group_.segment.mailbox(group_.rank, peer);
  return box.ring[box.filled.load(std::memory_order_relaxed) % shm::kMessagesInFlight];
}
void Messages::fill(int peer) {
  Message& message = next_to(peer);
  message.check = message.right_check();
  if (group_.context().chaos) [[unlikely]]
    group_.context().chaos->touch(What::kControl, {reinterpret_cast<std::byte*>(&message.id), 4 * sizeof(uint64_t)});
  std::atomic<uint32_t>& filled = group_.segment.mailbox(group_.rank, peer).filled;
  group_.segment.publish(filled, filled.load(std::memory_order_relaxed) + 1);
}

// True when the data is in the mailbox: the caller may have its buffer back.
bool Messages::start_send(Operation& operation) {
  const Chunk& chunk = operation.give[0];
  Message& message = next_to(operation.peer);
  message.dtype = static_cast<uint32_t>(operation.dtype);
  message.tag = operation.tag;
  message.bytes = chunk.bytes;
  message.id = operation.id = next_id_++;
  message.has_crc = group_.context().checksum ? 1 : 0;
  message.crc = message.has_crc != 0 ? crc32c({chunk.data, chunk.bytes}) : 0;
  transport::Chaos* chaos = group_.context().chaos.get();
  const bool fits = chunk.bytes <= shm::kMessageInlineBytes;
  message.kind = fits ? MessageKind::kInline : MessageKind::kReady;
  if (fits) {
    if (chunk.bytes > 0) std::memcpy(message.data, chunk.data, chunk.bytes);
    if (chaos) chaos->touch(What::kPayload, {message.data, chunk.bytes});
  } else if (const auto place = chaos ? std::nullopt : group_.place_of(chunk)) {
    message.place = *place;
  } else {
    CachingAllocator& scratch = group_.context().scratch();
    const memory::Block block = scratch.allocate(chunk.bytes);
    operation.scratch.push_back(block);
    std::memcpy(block.data, chunk.data, chunk.bytes);
    if (chaos) chaos->touch(What::kPayload, {static_cast<std::byte*>(block.data), chunk.bytes});
    message.place = Place::make(PlaceKind::kScratch, scratch.locate(block.data)->source_offset());
  }
  fill(operation.peer);
  return fits;
}

void Messages::send_all(std::vector<Intrusive<Operation>>& done) {
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
    (start_send(**at) ? done : unanswered_).push_back(*at);
    at = sending_.erase(at);
  }
}

void Messages::deliver(Operation& receive, int from, const Early& message, const std::byte* inline_data) {
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

int Messages::early_sender(const Operation& receive) const {
  for (int from = 0; from < group_.size; ++from) {
    if (receive.peer >= 0 && receive.peer != from) continue;
    const auto& messages = early_[static_cast<size_t>(from)];
    if (std::any_of(messages.begin(), messages.end(), [&](const Early& early) { return early.tag == receive.tag; }))
      return from;
  }
  return -1;
}

bool Messages::match_early(Operation& receive) {
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

void Messages::empty_mailbox(int from, std::vector<Intrusive<Operation>>& done) {
  shm::Mailbox& box = group_.segment.mailbox(from, group_.rank);
  for (;;) {
    const uint32_t emptied = box.emptied.load(std::memory_order_relaxed);
    if (box.filled.load(std::memory_order_acquire) == emptied) return;
    const Message& message = box.ring[emptied % shm::kMessagesInFlight];
    if (message.check != message.right_check()) [[unlikely]]
      raise_damage(group_, from, "a message's head");
    if (message.kind == MessageKind::kTaken) {
      const auto found = std::find_if(unanswered_.begin(), unanswered_.end(), [&](const auto& operation) {
        return operation->id == message.id && operation->peer == from;
      });
      CHORALE_INVARIANT(found != unanswered_.end(), "rank ", from, " took message ", message.id,
                        ", which is not there");
      done.push_back(*found);
      unanswered_.erase(found);
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
        done.push_back(*wanted);
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

bool Messages::has_message(const Operation& receive, std::vector<Intrusive<Operation>>& done) {
  for (int from = 0; from < group_.size; ++from) empty_mailbox(from, done);
  return early_sender(receive) >= 0;
}

bool Messages::take_message(Operation& receive, std::vector<Intrusive<Operation>>& done) {
  const bool found = match_early(receive);
  if (!answers_.empty()) send_all(done);
  return found;
}

void Messages::progress(std::vector<Intrusive<Operation>>& done) {
  send_all(done);
  for (auto at = posted_.begin(); at != posted_.end();) {
    if (match_early(**at)) {
      done.push_back(*at);
      at = posted_.erase(at);
    } else {
      ++at;
    }
  }
  if (!posted_.empty() || !unanswered_.empty() || !sending_.empty()) {
    for (int from = 0; from < group_.size; ++from) empty_mailbox(from, done);
  }
  if (!answers_.empty()) send_all(done);
}

}  // namespace chorale::comm
