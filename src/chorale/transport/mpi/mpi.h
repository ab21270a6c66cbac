// What we need of MPI, without its types: a module (base/shared_object.h) has the other side. Collectives are
// non-blocking ones, so that deadlines hold.
//
// One thread at a time calls it. Ranks are those of the communicator. An error of MPI's is a std::runtime_error with
// its text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "chorale/base/dtype.h"
#include "chorale/base/reduce.h"

namespace chorale::transport {

class Mpi {
 public:
  using Comm = uintptr_t;
  using Request = uintptr_t;
  static constexpr int kAnySource = -1;
  // The most bytes, and elements, of one call: MPI counts in ints.
  static constexpr size_t kMostBytes = size_t{1} << 30;

  // The module's, initialised on first use with the MPI of the process; finalised when the process ends, unless
  // something is then still in flight: mpirun stops the job in that case. Throws StateError without the module.
  static Mpi& get();
  // True in a process that mpirun, or srun with Open MPI's PMIx, has started.
  static bool started_by_mpi();

  Mpi() = default;
  virtual ~Mpi() = default;
  Mpi(const Mpi&) = delete;
  Mpi& operator=(const Mpi&) = delete;

  virtual void initialize() = 0;
  // How two runs of floating numbers become one where MPI's own operation is not defined for NaN.
  using Combine = void (*)(Reduce op, DType dtype, const void* in, void* in_out, int64_t elems);
  virtual void set_combine(Combine combine) = 0;

  virtual Comm world() = 0;
  virtual int rank(Comm comm) = 0;
  virtual int size(Comm comm) = 0;
  // `copy` is there when the request is done; every rank calls it.
  virtual Request duplicate(Comm comm, Comm& copy) = 0;
  // A communicator of some ranks of another one, all of which call it. Blocks.
  virtual Comm subgroup(Comm comm, std::span<const int> ranks) = 0;
  virtual void free(Comm comm) = 0;

  // True when the request is done; it is then gone.
  virtual bool test(Request& request) = 0;

  // ---- collectives. Null as input: the input lies in the output.

  virtual Request broadcast(Comm comm, void* data, size_t bytes, int root) = 0;
  virtual Request all_gather(Comm comm, const void* in, size_t bytes, void* out) = 0;
  // Sizes and places in the large buffer by rank, in bytes.
  struct Layout {
    std::span<const int> bytes, at;
  };
  virtual Request all_gather(Comm comm, const void* in, size_t bytes, void* out, Layout layout) = 0;
  virtual Request gather(Comm comm, const void* in, size_t bytes, void* out, int root) = 0;
  virtual Request scatter(Comm comm, const void* in, size_t bytes, void* out, int root) = 0;
  virtual Request all_to_all(Comm comm, const void* in, size_t bytes, void* out) = 0;
  virtual Request all_to_all(Comm comm, const void* in, Layout in_layout, void* out, Layout out_layout) = 0;
  // All dtypes but f16 and bf16, all reductions but the average.
  virtual Request all_reduce(Comm comm, const void* in, void* out, size_t elems, DType dtype, Reduce op) = 0;
  virtual Request reduce(Comm comm, const void* in, void* out, size_t elems, DType dtype, Reduce op, int root) = 0;
  virtual Request reduce_scatter(Comm comm, const void* in, void* out, std::span<const int> elems, DType dtype,
                                 Reduce op) = 0;

  // ---- messages

  virtual Request send(Comm comm, int to, int tag, const void* data, size_t bytes) = 0;
  virtual Request receive(Comm comm, int from, int tag, void* into, size_t bytes) = 0;
  // A message that has arrived, taken from the queue; receive_found() must follow.
  struct Found {
    uintptr_t message = 0;
    int source = -1;
    size_t bytes = 0;
  };
  virtual std::optional<Found> find(Comm comm, int from, int tag) = 0;
  virtual Request receive_found(const Found& found, void* into) = 0;
};

}  // namespace chorale::transport
