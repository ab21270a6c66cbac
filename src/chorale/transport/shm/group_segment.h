// The shared memory of a group on one host: which rank has entered which call, small data, flags, mailboxes, and the
// first failure. The layout is the protocol; comm/shm/shm_engine.h moves data with it.
//
// Note [Calls in shared memory]
// Calls of a group are numbered, and every rank runs them one after the other. A rank enters call k by writing a slot
// (fingerprint, where its data is, small data itself) and then its number. It goes on when it has seen number k of
// everybody, whatever the call: so every rank checks every other's fingerprint, and nobody ever acts on a call that
// some rank did not make.
//
//   Two slots per rank, used in turn, are enough. A rank writes slot k mod 2 for call k + 2 after it has finished call
//   k + 1, for which it saw everybody enter k + 1; a rank enters k + 1 after it has finished k, reading of slots
//   included. So nobody reads slot k any more. Data that fits into the slot therefore needs one exchange and no second
//   barrier.
//
//   Data elsewhere (a tensor, a staging buffer) has no second copy, so its owner waits for `acted`: each rank counts
//   the pieces it is done with, and when all have counted the piece, nobody touches the owner's data any more.
//
//   Two staging buffers per rank are enough too: piece p + 1 is staged into the buffer of piece p - 1, which everybody
//   was done with (acted) and which its owner had copied out before it acted on p.
//
//   Numbers are 32 bits and wrap around; compared are only numbers at most two calls (one piece) apart.
//
// Note [Hands]
// While a rank reads or writes memory that belongs to a peer's caller (not to this segment), its hands are up. It
// raises them first and looks for a failure second; a rank that gives up publishes the failure first and looks for
// raised hands second. Both in one total order, so either the first rank sees the failure and touches nothing, or the
// second sees the hands. With hands up a rank looks for a failure again after every chunk. A rank that takes its memory
// back after a failure thus waits a moment for hands to go down; if they stay up (the peer was stopped), the memory
// gets fresh pages (device/shared_pages.h) and the peer may wake when it likes. A rank that has read a peer's memory
// looks for a failure once more before it believes what it has read.
//
// Note [Doorbells]
// Nobody enters the kernel while all are awake. A rank that has waited long declares that it sleeps (`sleepers`, its
// own `sleeping`), looks once more, and sleeps on its doorbell. A rank that publishes anything does so with a
// sequentially consistent store and then reads `sleepers`: either it sees the sleeper and rings, or the sleeper's last
// look sees what was published. Sleep is bounded all the same, because the dead ring no bells.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "chorale/base/dtype.h"
#include "chorale/transport/shm/control_check.h"
#include "chorale/transport/shm/peer_process.h"

namespace chorale::transport::shm {

inline constexpr size_t kCacheLineBytes = 64;
inline constexpr size_t kSlotPayloadBytes = 16 << 10;
inline constexpr size_t kStagingBytes = 128 << 10;
// Parcels come many at a time from ranks that do not wait for each of them (Note [Parcels] in comm/message_queue.h).
inline constexpr size_t kMessageInlineBytes = 4 << 10, kParcelInlineBytes = 12 << 10;
inline constexpr uint32_t kMailboxLines = (256 << 10) / kCacheLineBytes;
inline constexpr size_t kFailureTextBytes = 2048;
inline constexpr int kMostRanks = 256;

// What a call is, in words whose meaning is the caller's business (comm/fingerprint.h): equal on all ranks, or the call
// is an error.
struct CallWords {
  std::array<uint64_t, 4> words{};

  friend bool operator==(const CallWords&, const CallWords&) = default;
  // Its part of the check of a slot (Note [Damage]).
  uint64_t weight() const { return weigh(words[0], words[1], words[2], words[3]); }
};

// Where data lies. The kind is in the two top bits.
enum class PlaceKind : uint8_t { kSlot, kPointer, kArena, kScratch };
struct Place {
  uint64_t bits = 0;
  static Place make(PlaceKind kind, uint64_t offset) { return {static_cast<uint64_t>(kind) << 62 | offset}; }
  PlaceKind kind() const { return static_cast<PlaceKind>(bits >> 62); }
  uint64_t offset() const { return bits & ~(uint64_t{3} << 62); }
};
struct PlacedChunk {
  Place place;
  uint64_t bytes = 0;
  uint32_t crc = 0;  // of the data, where payloads are checked
  uint32_t check = 0;

  uint32_t right_check() const { return check_of(weigh(place.bits, bytes, crc)); }
};

// What peers may do with a rank's data in a call.
enum class Exposure : uint16_t {
  kSlot,      // all of it is in the slot
  kReadable,  // some of it is outside the slot: peers read it there
  kWritable,  // outside, in pages of its own: peers may reduce it in place
  kStaged,    // too large for the slot and nowhere that peers can reach: piece by piece through the staging buffers
};

struct alignas(kCacheLineBytes) CallSlot {
  std::atomic<uint32_t> number{0};  // written last
  Exposure exposure = Exposure::kSlot;
  uint16_t check = 0;  // of the head, that is all before the payload
  CallWords call;
  Place place;  // of the one chunk; with one chunk per rank, payload begins with a table of PlacedChunk
  // 16 bytes share the line of the number: a small value travels in one line.
  alignas(16) std::byte payload[kSlotPayloadBytes];

  // The check for the number that will be, or was, published; `call_weight` is that of `call`.
  uint16_t right_check(uint32_t of_number, uint64_t call_weight) const {
    return check_of(call_weight + weigh<4>(uint64_t{of_number} << 32 | static_cast<uint64_t>(exposure), place.bits));
  }
  uint16_t right_check() const { return right_check(number.load(std::memory_order_relaxed), call.weight()); }
};
static_assert(offsetof(CallSlot, payload) == 48);

enum class RankState : uint32_t { kAbsent, kJoined, kLeft, kThrew };

// The call between hosts that a rank is in, where its group spans several: for neighbours that ask what it does
// (comm/net/net_inquiry.h). Only the rank writes it.
class OuterCall {
 public:
  void enter(uint32_t number, const CallWords& call) {
    number_.store(0, std::memory_order_relaxed);
    for (size_t w = 0; w < 4; ++w) words_[w].store(call.words[w], std::memory_order_release);
    number_.store(number, std::memory_order_release);
  }
  // Its number; 0 when there was none yet, or just now another begins.
  uint32_t read(CallWords& call) const {
    const uint32_t number = number_.load(std::memory_order_acquire);
    for (size_t w = 0; w < 4; ++w) call.words[w] = words_[w].load(std::memory_order_acquire);
    return number == number_.load(std::memory_order_relaxed) ? number : 0;
  }

 private:
  std::atomic<uint32_t> number_{0};
  std::array<std::atomic<uint64_t>, 4> words_{};
};

// What a rank has thrown, for others that ask why it does not come. Only the rank writes it, seldom: a reader that
// comes while another text is being written gets a mixture of both.
class LastException {
 public:
  void set(uint32_t number, const std::string& text) {
    length_.store(0, std::memory_order_relaxed);
    const size_t length = std::min(text.size(), text_.size());
    for (size_t i = 0; i < length; ++i) text_[i].store(text[i], std::memory_order_relaxed);
    number_.store(number, std::memory_order_relaxed);
    length_.store(static_cast<uint32_t>(length), std::memory_order_release);
  }
  // Empty if it has thrown nothing since it entered call `number`.
  std::string since(uint32_t number) const {
    const size_t length = std::min<size_t>(length_.load(std::memory_order_acquire), text_.size());
    if (number_.load(std::memory_order_relaxed) != number) return {};
    std::string text(length, ' ');
    for (size_t i = 0; i < length; ++i) text[i] = text_[i].load(std::memory_order_relaxed);
    return text;
  }

 private:
  std::atomic<uint32_t> length_{0}, number_{0};  // of the last call that it had entered
  std::array<std::atomic<char>, 1024> text_{};
};

struct RankControl {
  // Read by all waiting ranks.
  alignas(kCacheLineBytes) std::atomic<uint32_t> acted{0};  // the last piece this rank is done with
  std::atomic<uint32_t> staged{0};                          // the last piece in its staging buffer
  // Read by others only after a failure: stays in its owner's cache.
  alignas(kCacheLineBytes) std::atomic<uint32_t> hands{0};
  alignas(kCacheLineBytes) std::atomic<uint32_t> doorbell{0};
  std::atomic<uint32_t> sleeping{0};  // threads of this rank
  std::atomic<RankState> state{RankState::kAbsent};
  // The process that has attached as this rank: the one that introduced itself, or the group is not what it seems.
  std::atomic<int64_t> pid{0};
  std::atomic<uint64_t> start_time{0};
  OuterCall outer;
  LastException exception;
  CallSlot slots[2];
  alignas(kCacheLineBytes) std::byte staging[2][kStagingBytes];
};

// A mailbox from one rank to another (or to itself): a ring of lines that the sender fills and the receiver empties in
// order. A message takes as many lines as it has data for.
inline constexpr uint16_t kHasCrc = 1;
inline constexpr uint16_t kIsParcel = 2;  // Note [Parcels] in comm/message_queue.h
enum class MessageKind : uint32_t {
  kInline,  // the data is here
  kReady,   // the data waits at `place`; answered by kTaken
  kTaken,   // the receiver is done with the message `id` that was kReady
};
struct MessageHead {
  MessageKind kind = MessageKind::kInline;
  uint32_t dtype = 0;
  uint64_t id = 0;
  uint64_t tag = 0;
  uint64_t bytes = 0;
  Place place;
  uint32_t crc = 0;    // of the data, where payloads are checked
  uint16_t flags = 0;  // kHasCrc, kIsParcel
  uint16_t check = 0;  // of all before it

  uint16_t right_check() const {
    return check_of(weigh(uint64_t{dtype} << 32 | static_cast<uint64_t>(kind), id, tag, bytes, place.bits,
                          uint64_t{crc} << 32 | flags));
  }
  // The most bytes of data that lie behind a head.
  static constexpr size_t most_inline(bool is_parcel) { return is_parcel ? kParcelInlineBytes : kMessageInlineBytes; }
  // Whether a sender of ours would say this; words that are damaged, or anything else, are not acted on.
  bool is_sound() const {
    return check == right_check() && kind <= MessageKind::kTaken && flags <= (kHasCrc | kIsParcel) &&
           (kind == MessageKind::kTaken ||
            (dtype < kDTypeCount && (kind != MessageKind::kInline || bytes <= most_inline((flags & kIsParcel) != 0))));
  }
  // How many lines the message takes.
  uint32_t lines() const { return lines_for(kind == MessageKind::kInline ? bytes : 0); }
  static constexpr uint32_t lines_for(size_t inline_bytes) {
    return static_cast<uint32_t>((sizeof(MessageHead) + inline_bytes + kCacheLineBytes - 1) / kCacheLineBytes);
  }
};
static_assert(sizeof(MessageHead) == 48);
struct Message {
  MessageHead head;
  alignas(16) std::byte data[kParcelInlineBytes];

  // A receiver checks and uses the same words, whatever its sender writes meanwhile.
  MessageHead copy_of_head() const {
    const MessageHead copy = head;
    std::atomic_signal_fence(std::memory_order_acq_rel);  // nothing is read again below
    return copy;
  }
};
static_assert(offsetof(Message, data) == sizeof(MessageHead));
struct Mailbox {
  // Lines so far, modulo 2^32.
  alignas(kCacheLineBytes) std::atomic<uint32_t> filled{0};   // written by the sender
  alignas(kCacheLineBytes) std::atomic<uint32_t> emptied{0};  // written by the receiver
  // The ring has room for a message that begins on the last line.
  alignas(kCacheLineBytes) std::byte ring[kMailboxLines * kCacheLineBytes + sizeof(Message)];

  Message& at(uint32_t line) { return *reinterpret_cast<Message*>(ring + line % kMailboxLines * kCacheLineBytes); }
  // The line behind a message of so many lines. After one that reaches over the end, the next one is at the beginning.
  static uint32_t after(uint32_t line, uint32_t lines) {
    return line + std::min(lines, kMailboxLines - line % kMailboxLines);
  }
  // Whether what lies between two lines fits into the ring. Numbers of which one was made up, or that have passed each
  // other, are far apart.
  static bool can_hold(uint32_t emptied, uint32_t filled) { return filled - emptied <= kMailboxLines; }
};

enum class FailureState : uint32_t { kNone, kClaimed, kWritten };

struct GroupHeader {
  uint64_t magic = 0;
  uint32_t size = 0;
  std::atomic<uint32_t> attached{0};
  uint64_t token = 0;  // of this group and no other; those that may attach were told
  alignas(kCacheLineBytes) std::atomic<uint32_t> sleepers{0};
  // The first failure; ranks that come later report it too.
  alignas(kCacheLineBytes) std::atomic<FailureState> failure{FailureState::kNone};
  int32_t reporter = -1;  // group rank
  int32_t culprit = -1;   // global rank
  char text[kFailureTextBytes] = {};
};

// A view of the mapped memory.
class GroupSegment {
 public:
  static size_t bytes_for(int size) {
    const auto n = static_cast<size_t>(size);
    return controls_offset() + n * sizeof(RankControl) + n * n * sizeof(Mailbox);
  }
  // Fresh memory is all zeros, which is what the constructors of the atomics would write; so nothing is written (and no
  // page is taken) before it is used.
  GroupSegment(std::shared_ptr<Segment> memory, int size) : memory_(std::move(memory)), size_(size) {}

  GroupHeader& header() const { return *reinterpret_cast<GroupHeader*>(memory_->data()); }
  RankControl& control(int rank) const {
    return reinterpret_cast<RankControl*>(memory_->data() + controls_offset())[rank];
  }
  Mailbox& mailbox(int from, int to) const {
    auto* first = reinterpret_cast<Mailbox*>(memory_->data() + controls_offset() +
                                             static_cast<size_t>(size_) * sizeof(RankControl));
    return first[from * size_ + to];
  }
  CallSlot& slot(int rank, uint32_t number) const { return control(rank).slots[number & 1]; }
  std::byte* staging(int rank, uint32_t piece) const { return control(rank).staging[piece & 1]; }
  const Segment& memory() const { return *memory_; }

  // The first failure is the group's: later ones are not recorded.
  struct Failure {
    int reporter = -1;  // group rank; -1: nobody could say it
    int culprit = -1;   // global rank
    std::string text;
  };
  void record_failure(const Failure& failure) const;
  Failure recorded_failure() const;
  bool failed() const { return header().failure.load(std::memory_order_seq_cst) != FailureState::kNone; }

  // Stores so that sleepers notice (Note [Doorbells]).
  template <class T>
  void publish(std::atomic<T>& flag, T value) const {
    flag.store(value, std::memory_order_seq_cst);
    if (header().sleepers.load(std::memory_order_seq_cst) != 0) [[unlikely]]
      ring_all();
  }
  void ring_all() const;
  // Sleeps on the rank's doorbell for at most this long, unless `look` says that there is something to do.
  template <class Look>
  void sleep(int rank, int64_t nanoseconds, const Look& look) const {
    RankControl& own = control(rank);
    const uint32_t bell = own.doorbell.load(std::memory_order_seq_cst);
    own.sleeping.fetch_add(1, std::memory_order_seq_cst);  // several threads of a rank may wait
    header().sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (!look()) wait_for_bell(own.doorbell, bell, nanoseconds);
    header().sleepers.fetch_sub(1, std::memory_order_seq_cst);
    own.sleeping.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  static constexpr size_t controls_offset() { return (sizeof(GroupHeader) + 4095) / 4096 * 4096; }
  static void wait_for_bell(std::atomic<uint32_t>& bell, uint32_t seen, int64_t nanoseconds);

  std::shared_ptr<Segment> memory_;
  int size_;
};

}  // namespace chorale::transport::shm
