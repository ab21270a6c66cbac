// Faults on purpose, the same in every run: what a job does when a rank is late, stops or dies, and when a wire cuts or
// damages what it carries. Used by the fault matrix and by `chorale run --chaos`.
//
// A plan is a list of faults, each of which strikes one rank in one of its calls (collectives and messages of all its
// groups, counted from 1):
//
//   kill@rank=1,call=7;delay@rank=0,call=3,ms=50;corrupt@rank=2,call=4,what=payload
//
//   delay    the rank enters the call late (ms, 50)
//   stall    it stops for a while in the middle of the call: its next write, or before it touches others' data (ms, 50)
//   short    its next writes go out in small pieces
//   corrupt  a bit of its next message is wrong: what=control (the default), or what=payload
//   reset    its next write breaks the connection instead
//   stop     SIGSTOP
//   kill     SIGKILL
//
// `short` and `reset` happen on connections only; in shared memory there is nothing to write short or to cut, and UCX
// cuts its writes as it likes: over ucx nothing is `short`.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace chorale::transport {

struct ChaosFault {
  enum class Kind : uint8_t { kDelay, kStall, kShort, kCorrupt, kReset, kStop, kKill };
  enum class What : uint8_t { kControl, kPayload };

  Kind kind = Kind::kDelay;
  int rank = 0;
  uint64_t call = 1;
  std::chrono::milliseconds time{50};  // of a delay or a stall
  What what = What::kControl;          // of a corruption

  friend bool operator==(const ChaosFault&, const ChaosFault&) = default;
};
using ChaosPlan = std::vector<ChaosFault>;

// Reads a plan, or makes one for `size` ranks if the text is a number: the same for the same number. Throws
// InvalidArgument for anything else.
ChaosPlan chaos_plan(std::string_view text, int size);
// A text that chaos_plan reads.
std::string text_of(const ChaosPlan& plan);

// The faults of one rank. A rank without any holds a null pointer: being off costs a look at it. Thread-safe.
class Chaos {
 public:
  // Null when the plan has nothing for this rank.
  static std::shared_ptr<Chaos> of_rank(const ChaosPlan& plan, int rank);
  Chaos(ChaosPlan faults, int rank);

  // The rank enters its next call: it is delayed, stopped or killed here; the other faults wait for what follows.
  void enter_call();

  // ---- shared memory

  // Called in the middle of a call: stalls here if that is due.
  void pause();
  // Flips a bit of what is about to be published, after its checksum was taken, if that is due.
  void touch(ChaosFault::What what, std::span<std::byte> bytes);

  // ---- connections

  struct Write {
    size_t most;                   // write no more than so many bytes now
    bool reset = false;            // break the connection instead
    bool corrupt_control = false;  // flip() a bit of the frame's header after its checksum was taken
    bool corrupt_payload = false;  // the same with the data, on a copy: it belongs to the caller
  };
  // Called before a write of so many bytes; stalls if that is due. `has_payload`: the bytes hold data of a message.
  Write before_write(size_t bytes, bool has_payload);
  // Flips one bit, a different one each time.
  void flip(std::span<std::byte> bytes);

 private:
  // Takes one armed fault of this kind.
  bool take(ChaosFault::Kind kind, ChaosFault::What what, ChaosFault* fault = nullptr);

  std::mutex mutex_;
  ChaosPlan planned_;                   // of this rank, by call
  std::vector<ChaosFault> armed_;       // their call was entered
  std::atomic<size_t> armed_count_{0};  // read without the lock
  uint64_t call_ = 0;
  int short_writes_ = 0;  // still to come
  std::mt19937_64 random_;
};

}  // namespace chorale::transport
