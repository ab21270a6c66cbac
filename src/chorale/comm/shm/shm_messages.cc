#include "chorale/comm/shm/shm_messages.h"

#include <algorithm>
#include <cstring>

#include "chorale/base/crc32c.h"
#include "chorale/base/error.h"
#include "chorale/comm/lent_parcels.h"
#include "chorale/comm/shared_copy.h"

namespace chorale::comm {
namespace {

using shm::Message;
using shm::MessageHead;
using shm::MessageKind;
using shm::Place;
using shm::PlaceKind;
using What = transport::ChaosFault::What;

// Small messages that nobody asks for are kept up to this total; then their sender has to wait.
constexpr size_t kMostEarlyBytes = size_t{256} << 20;
// Parcels wait to be sent while so much lies ready for their receiver; one is always sent.
constexpr uint64_t kMostPostedBytes = uint64_t{256} << 20;

}  // namespace

ShmMessages::ShmMessages(ShmGroup& group)
    : group_(group),
      early_(static_cast<size_t>(group.size)),
      emptied_(static_cast<size_t>(group.size)),
      posted_bytes_(static_cast<size_t>(group.size)),
      sending_(static_cast<size_t>(group.size)) {}

void ShmMessages::submit(const base::Intrusive<Operation>& operation) {
  if (operation->kind != CallKind::kSend) return posted_.push_back(operation);
  sending_[static_cast<size_t>(operation->peer)].push_back(operation);
  ++waiting_sends_;
}

std::vector<base::Intrusive<Operation>> ShmMessages::abandon() {
  std::vector<base::Intrusive<Operation>> all;
  for (auto& sending : sending_) {
    all.insert(all.end(), sending.begin(), sending.end());
    sending.clear();
  }
  for (const Exposed& exposed : exposed_) {
    if (exposed.operation) all.push_back(exposed.operation);
    release(exposed);
  }
  all.insert(all.end(), posted_.begin(), posted_.end());
  all.insert(all.end(), finished_.begin(), finished_.end());
  waiting_sends_ = 0;
  exposed_.clear();
  posted_.clear();
  answers_.clear();
  finished_.clear();
  return all;
}

base::Intrusive<Operation> ShmMessages::pending() const {
  for (const Exposed& exposed : exposed_) {
    if (exposed.operation) return exposed.operation;
  }
  if (!posted_.empty()) return posted_.front();
  const auto sending = std::find_if(sending_.begin(), sending_.end(), [](const auto& all) { return !all.empty(); });
  return sending == sending_.end() ? base::Intrusive<Operation>() : sending->front();
}

bool ShmMessages::has_room(int peer, size_t inline_bytes) {
  shm::Mailbox& box = group_.segment.mailbox(group_.rank, peer);
  const uint32_t filled = box.filled.load(std::memory_order_relaxed);
  const uint32_t end = shm::Mailbox::after(filled, MessageHead::lines_for(inline_bytes));
  uint32_t& emptied = emptied_[static_cast<size_t>(peer)];
  if (shm::Mailbox::can_hold(emptied, end)) return true;
  // The count is read only when it matters: the receiver writes it, and its line would be fetched for each message.
  emptied = box.emptied.load(std::memory_order_acquire);
  return shm::Mailbox::can_hold(emptied, end);
}
Message& ShmMessages::next_to(int peer) const {
  shm::Mailbox& box = group_.segment.mailbox(group_.rank, peer);
  return box.at(box.filled.load(std::memory_order_relaxed));
}
void ShmMessages::fill(int peer) {
  MessageHead& head = next_to(peer).head;
  head.check = head.right_check();
  const uint32_t lines = head.lines();
  if (group_.context().chaos) [[unlikely]]
    group_.context().chaos->touch(What::kControl, {reinterpret_cast<std::byte*>(&head.id), 4 * sizeof(uint64_t)});
  std::atomic<uint32_t>& filled = group_.segment.mailbox(group_.rank, peer).filled;
  group_.segment.publish(filled, shm::Mailbox::after(filled.load(std::memory_order_relaxed), lines));
}

void ShmMessages::start_send(const base::Intrusive<Operation>& operation) {
  const Chunk& chunk = operation->give[0];
  const int to = operation->peer;
  Message& message = next_to(to);
  MessageHead& head = message.head;
  head.dtype = static_cast<uint32_t>(operation->dtype);
  head.tag = operation->tag;
  head.bytes = chunk.bytes;
  head.id = next_id_++;
  const bool checksum = group_.context().checksum;
  head.flags = static_cast<uint16_t>((checksum ? shm::kHasCrc : 0) | (operation->is_parcel ? shm::kIsParcel : 0));
  head.crc = checksum ? crc32c({chunk.data, chunk.bytes}) : 0;
  transport::Chaos* chaos = group_.context().chaos.get();
  if (chunk.bytes <= MessageHead::most_inline(operation->is_parcel)) {
    head.kind = MessageKind::kInline;
    copy_for_others(message.data, chunk.data, chunk.bytes);
    if (chaos) chaos->touch(What::kPayload, {message.data, chunk.bytes});
    fill(to);
    finished_.push_back(operation);  // the caller may have its buffer back
    return;
  }
  head.kind = MessageKind::kReady;
  Exposed exposed{operation, to, head.id, chunk.bytes, operation->deadline, {}, {}};
  // A parcel is copied before it is exposed, unless it is lent: it may be given up while its receiver reads it.
  const bool lent = operation->is_parcel && (operation->tag & kLentTag) != 0 && !operation->keep.empty() &&
                    !group_.all_in_one_process() && group_.is_writable(chunk);
  const bool in_place = !chaos && (lent || !operation->is_parcel);
  if (const auto place = in_place ? group_.place_of(chunk) : std::nullopt) {
    head.place = *place;
    if (lent) exposed.lent = Lent(operation->keep[0]);
  } else {
    CachingAllocator& scratch = group_.context().scratch();
    exposed.scratch = scratch.allocate(chunk.bytes);
    // Receivers have read what was there before, and will read this (Note [Memory that others have read]).
    copy_for_others(static_cast<std::byte*>(exposed.scratch.data), chunk.data, chunk.bytes);
    if (chaos) chaos->touch(What::kPayload, {exposed.scratch.data, chunk.bytes});
    head.place = Place::make(PlaceKind::kScratch, scratch.locate(exposed.scratch.data)->source_offset());
  }
  if (operation->is_parcel) {
    posted_bytes_[static_cast<size_t>(to)] += chunk.bytes;
    exposed.operation = {};
    finished_.push_back(operation);
  }
  exposed_.push_back(std::move(exposed));
  fill(to);
}

void ShmMessages::release(const Exposed& exposed) {
  if (exposed.scratch.data) group_.context().scratch().deallocate(exposed.scratch);
  if (!exposed.operation) posted_bytes_[static_cast<size_t>(exposed.to)] -= exposed.bytes;
}

void ShmMessages::end_exposure(int from, uint64_t id) {
  const auto found = std::find_if(exposed_.begin(), exposed_.end(),
                                  [&](const Exposed& exposed) { return exposed.id == id && exposed.to == from; });
  CHORALE_INVARIANT(found != exposed_.end(), "rank ", from, " took message ", id, ", which is not there");
  release(*found);
  if (found->operation) finished_.push_back(found->operation);
  exposed_.erase(found);
}

void ShmMessages::send_all() {
  // A full mailbox holds up nobody else's answers.
  std::erase_if(answers_, [&](const Answer& answer) {
    if (!has_room(answer.to, 0)) return false;
    MessageHead& head = next_to(answer.to).head;
    head.kind = MessageKind::kTaken;
    head.dtype = 0;
    head.id = answer.id;
    head.tag = head.bytes = 0;
    head.flags = 0;
    fill(answer.to);
    return true;
  });
  for (int peer = 0; waiting_sends_ > 0 && peer < group_.size; ++peer) send_to(peer);
}

// Messages to one rank keep their order; a full mailbox holds up nobody else's.
void ShmMessages::send_to(int peer) {
  auto& sending = sending_[static_cast<size_t>(peer)];
  const uint64_t& posted = posted_bytes_[static_cast<size_t>(peer)];
  while (!sending.empty()) {
    const base::Intrusive<Operation> next = sending.front();
    const bool waits = next->is_parcel && posted > 0 && posted + next->give[0].bytes > kMostPostedBytes;
    if (waits || !has_room(peer, inline_bytes(*next))) return;
    try {
      start_send(next);
    } catch (const std::exception& error) {  // no memory
      if (!next->is_parcel) throw;
      failed_.emplace_back(next, CallFailed{error.what(), group_.global(group_.rank)});
    }
    sending.pop_front();
    --waiting_sends_;
  }
}

void ShmMessages::deliver(const base::Intrusive<Operation>& receive, int from, const Early& message,
                          const std::byte* data) {
  try {
    copy(*receive, from, message, data);
    finished_.push_back(receive);
    last_sender_ = from;
  } catch (const CallFailed& failure) {
    if (!message.is_parcel) throw;
    failed_.emplace_back(receive, failure);
  }
  // A rank that failed here does not read it any more either.
  if (message.kind == MessageKind::kReady) answers_.push_back({from, message.id});
}

void ShmMessages::copy(Operation& receive, int from, const Early& message, const std::byte* data) {
  if (!message.is_parcel && (message.bytes != receive.take[0].bytes || message.dtype != receive.dtype))
    raise_misfit(group_.membership, from, message.bytes, message.dtype, receive);
  if (group_.context().checksum && !message.crc) {
    throw CallFailed{concat("rank ", group_.global(from), " sends without checksums, and rank ",
                            group_.global(group_.rank), " wants them: CHORALE_CHECKSUM differs"),
                     group_.global(from)};
  }
  const auto room = [&] {
    receive.source = from;
    return message.is_parcel ? room_for_parcel(group_.membership, receive, from, message.bytes, message.data)
                             : receive.take[0];
  };
  Chunk to;
  if (message.kind == MessageKind::kInline) {
    to = room();
    const void* const there = message.data.defined() ? message.data.raw() : data;
    if (to.bytes > 0 && there != to.data) std::memcpy(to.data, there, to.bytes);
  } else {
    const Hands hands(group_);
    check_not_failed(group_);
    // What the sender names must lie in its memory before room is made for it.
    data = group_.view(from, message.place, message.bytes);
    to = room();
    constexpr size_t kStep = 256 << 10;
    for (size_t at = 0; at < to.bytes; at += kStep) {
      copy_shared(to.data + at, data + at, std::min(kStep, to.bytes - at));
      check_not_failed(group_);
    }
  }
  if (message.crc && crc32c({to.data, to.bytes}) != *message.crc) raise_damage(group_, from, "a message");
}

int ShmMessages::early_sender(const Operation& receive) const {
  for (int step = 1; step <= group_.size; ++step) {
    const int from = (last_sender_ + step) % group_.size;
    const auto& messages = early_[static_cast<size_t>(from)];
    if (std::any_of(messages.begin(), messages.end(),
                    [&](const Early& early) { return fits(receive, from, early.is_parcel, early.tag); }))
      return from;
  }
  return -1;
}

bool ShmMessages::match_early(const base::Intrusive<Operation>& receive) {
  const int from = early_sender(*receive);
  if (from < 0) return false;
  auto& messages = early_[static_cast<size_t>(from)];
  const auto found = std::find_if(messages.begin(), messages.end(),
                                  [&](const Early& early) { return fits(*receive, from, early.is_parcel, early.tag); });
  deliver(receive, from, *found, nullptr);
  if (found->data.defined()) early_bytes_ -= found->bytes;
  messages.erase(found);
  return true;
}

void ShmMessages::empty_mailbox(int from) {
  shm::Mailbox& box = group_.segment.mailbox(from, group_.rank);
  struct Emptying {
    const ShmGroup& group;
    std::atomic<uint32_t>& told;
    uint32_t line = told.load(std::memory_order_relaxed);
    void tell() const {
      if (line != told.load(std::memory_order_relaxed)) group.segment.publish(told, line);
    }
    ~Emptying() { tell(); }
  } emptying{group_, box.emptied};
  for (uint32_t filled = emptying.line;;) {
    if (filled == emptying.line) filled = box.filled.load(std::memory_order_acquire);
    if (filled == emptying.line) return;
    const Message& message = box.at(emptying.line);
    const MessageHead head = message.copy_of_head();
    if (!shm::Mailbox::can_hold(emptying.line, filled) || !head.is_sound()) [[unlikely]]
      raise_damage(group_, from, "a message's head");
    if (head.kind == MessageKind::kTaken) {
      end_exposure(from, head.id);
    } else {
      Early early{.is_parcel = (head.flags & shm::kIsParcel) != 0,
                  .kind = head.kind,
                  .dtype = static_cast<DType>(head.dtype),
                  .id = head.id,
                  .tag = head.tag,
                  .bytes = head.bytes,
                  .place = head.place,
                  .crc = (head.flags & shm::kHasCrc) != 0 ? std::optional(head.crc) : std::nullopt,
                  .data = {}};
      const auto wanted = std::find_if(posted_.begin(), posted_.end(), [&](const auto& receive) {
        return fits(*receive, from, early.is_parcel, head.tag);
      });
      if (wanted != posted_.end()) {
        deliver(*wanted, from, early, message.data);
        posted_.erase(wanted);
      } else {
        if (early.kind == MessageKind::kInline) {
          if (early_bytes_ > kMostEarlyBytes) return;
          early.data = Tensor::empty({static_cast<int64_t>(early.bytes)}, DType::kU8);
          if (early.bytes > 0) std::memcpy(early.data.raw(), message.data, early.bytes);
          early_bytes_ += early.bytes;
        }
        early_[static_cast<size_t>(from)].push_back(std::move(early));
      }
    }
    emptying.line = shm::Mailbox::after(emptying.line, head.lines());
    // A sender that waits for room need not wait for the end.
    if (emptying.line - box.emptied.load(std::memory_order_relaxed) >= shm::kMailboxLines / 4) emptying.tell();
  }
}

void ShmMessages::empty_mailboxes() {
  const int first = last_sender_ + 1;
  for (int step = 0; step < group_.size; ++step) empty_mailbox((first + step) % group_.size);
}

bool ShmMessages::remove(const Operation& parcel) {
  const auto is_it = [&](const base::Intrusive<Operation>& one) { return one.get() == &parcel; };
  if (parcel.kind != CallKind::kSend) return std::erase_if(posted_, is_it) > 0;
  const size_t removed = std::erase_if(sending_[static_cast<size_t>(parcel.peer)], is_it);
  waiting_sends_ -= removed;
  return removed > 0;
}

bool ShmMessages::has_message(const Operation& receive) {
  empty_mailboxes();
  return early_sender(receive) >= 0;
}

bool ShmMessages::take_message(const base::Intrusive<Operation>& receive) {
  const bool found = match_early(receive);
  // It was not submitted: its engine need not finish it.
  std::erase(finished_, receive);
  if (!answers_.empty()) send_all();
  return found;
}

void ShmMessages::progress(std::vector<base::Intrusive<Operation>>& done) {
  // Hands over what is finished also when another message fails.
  struct HandOver {
    std::vector<base::Intrusive<Operation>>&from, &to;
    ~HandOver() {
      to.insert(to.end(), from.begin(), from.end());
      from.clear();
    }
  } const hand_over{finished_, done};
  send_all();
  for (auto at = posted_.begin(); at != posted_.end();) {
    if (match_early(*at)) {
      at = posted_.erase(at);
    } else {
      ++at;
    }
  }
  if (!posted_.empty() || !exposed_.empty() || waiting_sends_ > 0) {
    empty_mailboxes();
  }
  if (!answers_.empty()) send_all();
}

}  // namespace chorale::comm
