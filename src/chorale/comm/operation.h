// Inside comm: one call in flight, as far as all engines know it. How far it has come is the business of the engine
// that moves it (shm/shm_call.h, net/net_call.h, mpi/mpi_call.h).
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <optional>
#include <vector>

#include "chorale/base/deadline.h"
#include "chorale/base/intrusive.h"
#include "chorale/base/pool.h"
#include "chorale/base/small_vector.h"
#include "chorale/comm/fingerprint.h"
#include "chorale/tensor/tensor.h"

namespace chorale::comm {

struct Chunk {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// Note [Give and take]
// Every collective is: each rank gives one chunk for everybody, or one per rank; and takes one chunk, or one per rank.
//
//               gives                takes
//   broadcast   root: 1              others: what root gives
//   all_gather  1                    n: what each rank gives
//   gather      1                    root: n
//   scatter     root: n              what root gives to this rank
//   all_to_all  n                    n: what each rank gives to this rank
//   all_reduce  1                    1: everybody's chunk, combined
//   reduce      1                    root: 1, combined
//   reduce_scatter  n                1: what everybody gives to this rank, combined
struct Operation : base::RefCounted {
  // It is not defaulted: a pool would then fill all of it with zeros first, on the path of every call.
  Operation() {}  // NOLINT(modernize-use-equals-default)

  Fingerprint print;
  CallKind kind = CallKind::kNone;
  DType dtype = DType::kU8;
  Reduction reduction{Reduce::kNone};
  int root = -1;  // group rank
  uint32_t number = 0;
  SmallVector<Chunk, 2> give, take;

  Deadline::Clock::time_point issued;
  Deadline::Clock::time_point looked;  // the last time that a poll asked why it does not move
  Deadline deadline = Deadline::never();
  // It has failed for a reason that another rank may know better; that rank has so long to say it (kUnsurePatience).
  std::optional<Deadline> patience;
  // A monitored barrier has these: the time of each rank, and whether all absent ranks are named or only the first.
  Deadline::Clock::duration timeout{};
  bool wait_for_all = false;

  // Point-to-point: the other side (group rank; -1 as a source: any), the tag, and the sender.
  int peer = -1;
  uint64_t tag = 0;
  int source = -1;

  // A parcel (Note [Parcels] in message_queue.h), and the most bytes that a receive of one takes.
  bool is_parcel = false;
  uint64_t most_bytes = 0;

  uint64_t flight = 0;  // its number in the flight recorder

  // What the trace wants: shapes of what it moves, if anybody asks for them, and when it was done.
  bool traced = false;
  Deadline::Clock::time_point completed;
  std::vector<std::vector<int64_t>> shapes;

  // What must live until it is done, what is then done with the result, and callbacks.
  SmallVector<base::Intrusive<chorale::Storage>, 2> keep;
  Tensors results;
  std::vector<std::function<void()>> finish;
  std::vector<std::function<void()>> then;

  enum class State : uint8_t { kPending, kDone, kFailed };
  std::atomic<State> state{State::kPending};
  std::exception_ptr error;
  bool told = false;  // `then` has run

  bool is_message() const { return kind == CallKind::kSend || kind == CallKind::kRecv; }
  bool pending() const { return state.load(std::memory_order_acquire) == State::kPending; }

  static base::Intrusive<Operation> make() { return base::Intrusive<Operation>::adopt(base::Pool<Operation>::make()); }
  static void destroy(Operation* operation) { base::Pool<Operation>::recycle(operation); }
};

}  // namespace chorale::comm
