// Inside comm: a collective of an mpi group.
//
// Note [Calls over MPI]
// MPI hangs, or writes past the end of memory, when ranks make calls that do not fit together. So a rank enters a call
// with a record of what it is about to do, all records are gathered, and data moves only when they fit: one small
// exchange more per call. Data then moves by MPI's own collective, in pieces, because MPI counts in ints. A barrier is
// the exchange alone.
//
// What MPI has started cannot be taken back. After a failure in the middle of a call its memory stays MPI's: it is
// never given back to the allocator, and a peer that wakes late may still write to it.
#pragma once

#include <memory>
#include <vector>

#include "chorale/comm/roll_call.h"
#include "chorale/transport/mpi/mpi.h"

namespace chorale::comm {

struct MpiGroup {
  transport::Mpi& mpi;
  const transport::Mpi::Comm comm;
  const Membership& membership;  // the engine's
  int rank() const { return membership.rank; }
  int size() const { return membership.size(); }
  int global(int peer) const { return membership.global(peer); }
};

// Tags of messages between ranks of a communicator. Those of data follow the last.
enum MpiTag : int { kHeaderTag = 1, kNoticeTag, kArrivalTag, kGoTag, kFirstDataTag };

// What ranks tell each other on entering a call.
struct MpiRecord {
  Fingerprint print;
  uint32_t number = 0, unused = 0;
  uint64_t given = 0;            // bytes of the first chunk that the rank gives
  uint64_t most = 0, least = 0;  // bytes of the largest and of the smallest chunk that it gives or takes
};

class MpiCall {
 public:
  MpiCall(const MpiGroup& group, RollCall& roll_call) : group_(group), roll_call_(roll_call) {}

  // `piece_bytes`: the most of all chunks together that one of MPI's calls moves.
  void begin(const base::Intrusive<Operation>& operation, size_t piece_bytes);
  // Moves it as far as it goes; true when it is done. Throws CallFailed when the ranks' calls do not fit together.
  bool step();
  // Leaves the call's memory to MPI if it is still using it.
  void abandon();

 private:
  enum class Stage : uint8_t { kEntering, kComparing, kMoving };

  // Memory that grows and is not initialised.
  class Buffer {
   public:
    std::byte* of(size_t bytes);

   private:
    std::unique_ptr<std::byte[]> data_;
    size_t bytes_ = 0;
  };
  // The pieces of one chunk per rank as one stretch of memory: the chunks' own where they lie one after the other, else
  // a buffer's.
  struct Side {
    std::byte* data = nullptr;
    bool staged = false;
    std::vector<int> bytes, at;
    Buffer buffer;
  };

  bool step_monitored_barrier();
  void enter();
  void check_records();
  void compare_sizes();
  void check_sizes();
  bool is_even() const;
  bool is_half() const { return chorale::is_half(operation_->dtype); }
  Chunk piece_of(const Chunk& chunk) const;
  void lay_out(Side& side, const SmallVector<Chunk, 2>& chunks, const Chunk& other, bool copy_in);
  void copy_out(const Side& side, const SmallVector<Chunk, 2>& chunks) const;
  // These turn elements into what travels, and back: f16 and bf16 into f32, multiplied by the factor.
  void prepare(const Chunk& piece, std::byte* to) const;
  void conclude(std::byte* from, const Chunk& piece) const;
  DType travelling() const { return compute_of(operation_->dtype); }
  Reduce reduction() const;
  void start_piece();
  void start_reduction();
  void start_reduce_scatter();
  void end_piece();

  const MpiGroup& group_;
  RollCall& roll_call_;
  base::Intrusive<Operation> operation_;
  Stage stage_ = Stage::kEntering;
  transport::Mpi::Request request_ = 0;
  std::vector<MpiRecord> records_;
  std::vector<uint64_t> sizes_, other_sizes_;
  size_t limit_ = 0, at_ = 0, end_ = 0;  // of a chunk, in bytes
  Side in_, out_;
  std::byte* reduced_ = nullptr;
  std::vector<int> elems_;
};

}  // namespace chorale::comm
