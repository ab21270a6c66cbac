// The side of transport/mpi/mpi.h that knows MPI.
// Only the C interface: the C++ one is another library.
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "chorale/transport/mpi/mpi.h"

namespace {

using chorale::DType;
using chorale::Reduce;
using chorale::transport::Mpi;

void check(int result) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(result, text, &length);
  throw std::runtime_error("MPI says: " + std::string(text, static_cast<size_t>(length)));
}

// MPI's handles are integers or pointers.
// NOLINTBEGIN(bugprone-sizeof-expression)
template <class Handle>
uintptr_t pack(Handle handle) {
  static_assert(sizeof(handle) <= sizeof(uintptr_t));
  uintptr_t packed = 0;
  std::memcpy(&packed, &handle, sizeof(handle));
  return packed;
}
template <class Handle>
Handle unpack(uintptr_t packed) {
  Handle handle;
  std::memcpy(&handle, &packed, sizeof(handle));
  return handle;
}
// NOLINTEND(bugprone-sizeof-expression)
MPI_Comm comm_of(Mpi::Comm comm) { return unpack<MPI_Comm>(comm); }

MPI_Datatype type_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kU8:
      return MPI_UINT8_T;
    case DType::kI8:
      return MPI_INT8_T;
    case DType::kI16:
      return MPI_INT16_T;
    case DType::kI32:
      return MPI_INT32_T;
    case DType::kI64:
      return MPI_INT64_T;
    case DType::kF32:
      return MPI_FLOAT;
    case DType::kF64:
      return MPI_DOUBLE;
    case DType::kC64:
      return MPI_C_FLOAT_COMPLEX;
    case DType::kC128:
      return MPI_C_DOUBLE_COMPLEX;
    default:
      throw std::runtime_error("MPI has no such dtype");
  }
}

Mpi::Combine combine_two = nullptr;

template <Reduce op>
void combine_floats(void* in, void* in_out, int* elems, MPI_Datatype* type) {
  combine_two(op, *type == MPI_FLOAT ? DType::kF32 : DType::kF64, in, in_out, *elems);
}

class MpiModule final : public Mpi {
 public:
  void initialize() override {
    int initialized = 0;
    check(MPI_Initialized(&initialized));
    if (!initialized) {
      int provided = 0;
      check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided));
      std::atexit(finalize);
      if (provided < MPI_THREAD_SERIALIZED)
        throw std::runtime_error("MPI was built without support for threads (MPI_THREAD_SERIALIZED)");
    }
    check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    check(MPI_Op_create(combine_floats<Reduce::kMin>, 1, &float_min_));
    check(MPI_Op_create(combine_floats<Reduce::kMax>, 1, &float_max_));
  }

  void set_combine(Combine combine) override { combine_two = combine; }

  Comm world() override { return pack(MPI_COMM_WORLD); }
  int rank(Comm comm) override {
    int rank = 0;
    check(MPI_Comm_rank(comm_of(comm), &rank));
    return rank;
  }
  int size(Comm comm) override {
    int size = 0;
    check(MPI_Comm_size(comm_of(comm), &size));
    return size;
  }
  Request duplicate(Comm comm, Comm& copy) override {
    static_assert(sizeof(MPI_Comm) <= sizeof(Comm));
    return start([&](MPI_Request* request) {
      return MPI_Comm_idup(comm_of(comm), reinterpret_cast<MPI_Comm*>(&copy), request);
    });
  }
  Comm subgroup(Comm comm, std::span<const int> ranks) override {
    MPI_Group all, some;
    check(MPI_Comm_group(comm_of(comm), &all));
    check(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some));
    MPI_Comm made;
    const int result = MPI_Comm_create_group(comm_of(comm), some, 0, &made);
    MPI_Group_free(&some);
    MPI_Group_free(&all);
    check(result);
    return pack(made);
  }
  void free(Comm comm) override {
    auto freed = comm_of(comm);
    check(MPI_Comm_free(&freed));
  }

  bool test(Request& request) override {
    auto tested = unpack<MPI_Request>(request);
    int done = 0;
    check(MPI_Test(&tested, &done, MPI_STATUS_IGNORE));
    if (!done) return false;
    request = 0;
    --in_flight_;
    return true;
  }

  Request broadcast(Comm comm, void* data, size_t bytes, int root) override {
    return start([&](MPI_Request* request) {
      return MPI_Ibcast(data, static_cast<int>(bytes), MPI_BYTE, root, comm_of(comm), request);
    });
  }
  Request all_gather(Comm comm, const void* in, size_t bytes, void* out) override {
    const int count = static_cast<int>(bytes);
    return start([&](MPI_Request* request) {
      return MPI_Iallgather(in ? in : MPI_IN_PLACE, count, MPI_BYTE, out, count, MPI_BYTE, comm_of(comm), request);
    });
  }
  Request all_gather(Comm comm, const void* in, size_t bytes, void* out, Layout layout) override {
    return start([&](MPI_Request* request) {
      return MPI_Iallgatherv(in ? in : MPI_IN_PLACE, static_cast<int>(bytes), MPI_BYTE, out, layout.bytes.data(),
                             layout.at.data(), MPI_BYTE, comm_of(comm), request);
    });
  }
  Request gather(Comm comm, const void* in, size_t bytes, void* out, int root) override {
    const int count = static_cast<int>(bytes);
    return start([&](MPI_Request* request) {
      return MPI_Igather(in, count, MPI_BYTE, out, count, MPI_BYTE, root, comm_of(comm), request);
    });
  }
  Request scatter(Comm comm, const void* in, size_t bytes, void* out, int root) override {
    const int count = static_cast<int>(bytes);
    return start([&](MPI_Request* request) {
      return MPI_Iscatter(in, count, MPI_BYTE, out, count, MPI_BYTE, root, comm_of(comm), request);
    });
  }
  Request all_to_all(Comm comm, const void* in, size_t bytes, void* out) override {
    const int count = static_cast<int>(bytes);
    return start([&](MPI_Request* request) {
      return MPI_Ialltoall(in, count, MPI_BYTE, out, count, MPI_BYTE, comm_of(comm), request);
    });
  }
  Request all_to_all(Comm comm, const void* in, Layout in_layout, void* out, Layout out_layout) override {
    return start([&](MPI_Request* request) {
      return MPI_Ialltoallv(in, in_layout.bytes.data(), in_layout.at.data(), MPI_BYTE, out, out_layout.bytes.data(),
                            out_layout.at.data(), MPI_BYTE, comm_of(comm), request);
    });
  }
  Request all_reduce(Comm comm, const void* in, void* out, size_t elems, DType dtype, Reduce op) override {
    return start([&](MPI_Request* request) {
      return MPI_Iallreduce(in ? in : MPI_IN_PLACE, out, static_cast<int>(elems), type_of(dtype), op_of(op, dtype),
                            comm_of(comm), request);
    });
  }
  Request reduce(Comm comm, const void* in, void* out, size_t elems, DType dtype, Reduce op, int root) override {
    return start([&](MPI_Request* request) {
      return MPI_Ireduce(in ? in : MPI_IN_PLACE, out, static_cast<int>(elems), type_of(dtype), op_of(op, dtype), root,
                         comm_of(comm), request);
    });
  }
  Request reduce_scatter(Comm comm, const void* in, void* out, std::span<const int> elems, DType dtype,
                         Reduce op) override {
    return start([&](MPI_Request* request) {
      return MPI_Ireduce_scatter(in, out, elems.data(), type_of(dtype), op_of(op, dtype), comm_of(comm), request);
    });
  }

  Request send(Comm comm, int to, int tag, const void* data, size_t bytes) override {
    return start([&](MPI_Request* request) {
      return MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, tag, comm_of(comm), request);
    });
  }
  Request receive(Comm comm, int from, int tag, void* into, size_t bytes) override {
    return start([&](MPI_Request* request) {
      return MPI_Irecv(into, static_cast<int>(bytes), MPI_BYTE, from, tag, comm_of(comm), request);
    });
  }
  std::optional<Found> find(Comm comm, int from, int tag) override {
    int there = 0, bytes = 0;
    MPI_Message message;
    MPI_Status status;
    check(MPI_Improbe(from == kAnySource ? MPI_ANY_SOURCE : from, tag, comm_of(comm), &there, &message, &status));
    if (!there) return std::nullopt;
    check(MPI_Get_count(&status, MPI_BYTE, &bytes));
    return Found{pack(message), status.MPI_SOURCE, static_cast<size_t>(bytes)};
  }
  Request receive_found(const Found& found, void* into) override {
    return start([&](MPI_Request* request) {
      auto message = unpack<MPI_Message>(found.message);
      return MPI_Imrecv(into, static_cast<int>(found.bytes), MPI_BYTE, &message, request);
    });
  }

 private:
  template <class Call>
  static Request start(const Call& call) {
    MPI_Request request;
    check(call(&request));
    ++in_flight_;
    return pack(request);
  }

  MPI_Op op_of(Reduce op, DType dtype) const {
    const bool floating = dtype == DType::kF32 || dtype == DType::kF64;
    const bool boolean = dtype == DType::kBool;
    switch (op) {
      case Reduce::kSum:
        return boolean ? MPI_BOR : MPI_SUM;
      case Reduce::kProduct:
        return boolean ? MPI_BAND : MPI_PROD;
      case Reduce::kMin:
        return floating ? float_min_ : boolean ? MPI_BAND : MPI_MIN;
      case Reduce::kMax:
        return floating ? float_max_ : boolean ? MPI_BOR : MPI_MAX;
      case Reduce::kBitAnd:
        return MPI_BAND;
      case Reduce::kBitOr:
        return MPI_BOR;
      case Reduce::kBitXor:
        return MPI_BXOR;
      default:
        throw std::runtime_error("MPI has no such reduction");
    }
  }

  // MPI_Finalize waits for every rank: one that gave up on a call must not call it.
  static void finalize() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!finalized && in_flight_ == 0) MPI_Finalize();
  }

  static inline int64_t in_flight_ = 0;
  MPI_Op float_min_{}, float_max_{};
};

}  // namespace

extern "C" void* chorale_mpi_module_1() {
  static MpiModule module;
  return static_cast<Mpi*>(&module);
}
