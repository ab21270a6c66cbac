#include "chorale/device/cuda/nccl_stand_in_test_util.h"

#include <nccl.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "chorale/base/dtype.h"
#include "chorale/base/reduce.h"
#include "chorale/vec/combine.h"

extern "C" {
chorale::cuda::NcclStandIn chorale_nccl_stand_in;
}

namespace {

using chorale::DType;
using chorale::Reduce;

chorale::cuda::NcclStandIn& script() { return chorale_nccl_stand_in; }

enum class Kind { kAllReduce, kReduce, kBroadcast, kSend, kRecv };
struct Op {
  Kind kind;
  const void* in;
  void* out;
  size_t count;
  ncclDataType_t type;
  Reduce reduce;
  double factor;
  int peer;  // or root
};
using Ops = std::vector<Op>;

DType dtype_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
      return DType::kI8;
    case ncclInt32:
      return DType::kI32;
    case ncclInt64:
      return DType::kI64;
    case ncclFloat16:
      return DType::kF16;
    case ncclBfloat16:
      return DType::kBF16;
    case ncclFloat32:
      return DType::kF32;
    case ncclFloat64:
      return DType::kF64;
    default:
      return DType::kU8;
  }
}

double number_of(const void* scalar, DType dtype) {
  const auto read = [&]<class T>(T number) {
    std::memcpy(&number, scalar, sizeof(number));
    return number;
  };
  switch (dtype) {
    case DType::kF16:
      return static_cast<float>(read(chorale::float16()));
    case DType::kBF16:
      return static_cast<float>(read(chorale::bfloat16()));
    case DType::kF32:
      return read(float());
    default:
      return read(double());
  }
}

}  // namespace

struct Meeting {
  std::mutex mutex;
  int size = 0, here = 0;
  bool broken = false, wrong = false;       // a rank has aborted; ranks asked for different things
  std::map<int, std::map<int, Ops>> asked;  // by call and rank
  std::map<int, bool> done;                 // by call
};

struct ncclComm {
  std::shared_ptr<Meeting> meeting;
  int rank = 0;
  int calls = 0;
  bool failed = false;
  std::map<int, double> factors;  // of reductions that were made
};

namespace {

std::mutex ids_mutex;
std::map<uint64_t, std::shared_ptr<Meeting>> meetings;
uint64_t last_id = 0;

// Runs what all ranks asked for. False where that does not fit together.
bool run(std::map<int, Ops>& asked, int size) {
  std::map<std::pair<int, int>, std::vector<const Op*>> sent;  // from and to
  for (auto& [rank, ops] : asked) {
    for (const Op& op : ops) {
      if (op.kind == Kind::kSend) sent[{rank, op.peer}].push_back(&op);
    }
  }
  std::vector<std::pair<void*, std::vector<std::byte>>> results;  // written when everything was read
  for (auto& [rank, ops] : asked) {
    for (const Op& op : ops) {
      if (op.kind != Kind::kRecv) continue;
      auto& from = sent[{op.peer, rank}];
      if (from.empty() || from.front()->count != op.count) return false;
      const auto* const data = static_cast<const std::byte*>(from.front()->in);
      results.emplace_back(op.out, std::vector<std::byte>(data, data + op.count));
      from.erase(from.begin());
    }
  }
  for (const auto& [pair, left] : sent) {
    if (!left.empty()) return false;
  }
  // The others in the order in which each rank asked.
  std::vector<std::vector<const Op*>> lists(static_cast<size_t>(size));
  for (auto& [rank, ops] : asked) {
    for (const Op& op : ops) {
      if (op.kind != Kind::kSend && op.kind != Kind::kRecv) lists[static_cast<size_t>(rank)].push_back(&op);
    }
  }
  for (size_t i = 0; i < lists[0].size(); ++i) {
    const Op& first = *lists[0][i];
    const DType dtype = dtype_of(first.type);
    const size_t bytes = first.count * chorale::size_of(dtype);
    std::vector<const void*> sources;
    for (const auto& list : lists) {
      if (list.size() != lists[0].size()) return false;
      const Op& op = *list[i];
      if (op.kind != first.kind || op.count != first.count || op.type != first.type || op.reduce != first.reduce ||
          op.factor != first.factor || op.peer != first.peer)
        return false;
      sources.push_back(op.in);
    }
    std::vector<std::byte> result(bytes);
    if (first.kind == Kind::kBroadcast) {
      if (bytes > 0) std::memcpy(result.data(), sources[static_cast<size_t>(first.peer)], bytes);
    } else if (bytes > 0) {
      void* const to = result.data();
      chorale::vec::combine(first.reduce, dtype, sources, {&to, 1}, static_cast<int64_t>(first.count), first.factor);
    }
    for (int r = 0; r < size; ++r) {
      if (first.kind == Kind::kReduce && r != first.peer) continue;
      results.emplace_back(lists[static_cast<size_t>(r)][i]->out, result);
    }
  }
  for (const auto& [to, bytes] : results) {
    if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
  }
  return true;
}

thread_local int depth = 0;
thread_local ncclComm* grouped = nullptr;
thread_local Ops group;

ncclResult_t submit(ncclComm& comm, Ops ops) {
  Meeting& meeting = *comm.meeting;
  const std::lock_guard lock(meeting.mutex);
  const int call = ++comm.calls;
  ++script().calls;
  const bool own = script().rank == comm.rank;
  if (own && script().fails_at == call) comm.failed = true;
  if (own && script().hangs_at == call) return ncclInProgress;
  auto& asked = meeting.asked[call];
  asked[comm.rank] = std::move(ops);
  if (static_cast<int>(asked.size()) == meeting.size && !meeting.broken) {
    if (!run(asked, meeting.size)) meeting.wrong = true;
    meeting.done[call] = true;
    meeting.asked.erase(call);
  }
  return ncclInProgress;
}

ncclResult_t add(ncclComm_t comm, const Op& op) {
  if (depth > 0) {
    grouped = comm;
    group.push_back(op);
    return ncclSuccess;
  }
  return submit(*comm, {op});
}

// Makes an operation with one of NCCL's own reductions, or with one that a caller has made.
Op reducing(Kind kind, const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
            ncclComm_t comm) {
  Op made{kind, in, out, count, type, Reduce::kSum, 1, root};
  if (op == ncclProd) made.reduce = Reduce::kProduct;
  if (op == ncclMin) made.reduce = Reduce::kMin;
  if (op == ncclMax) made.reduce = Reduce::kMax;
  if (op == ncclAvg) made.reduce = Reduce::kAverage;
  if (const auto found = comm->factors.find(op); found != comm->factors.end()) made.factor = found->second;
  return made;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "an error of the stand-in"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const std::lock_guard lock(ids_mutex);
  *id = {};
  ++last_id;
  ++script().made_ids;
  std::memcpy(id, &last_id, sizeof(last_id));
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  uint64_t number = 0;
  std::memcpy(&number, &id, sizeof(number));
  if (number == 0 || config->blocking != 0) return ncclInvalidArgument;
  const std::lock_guard lock(ids_mutex);
  auto& meeting = meetings[number];
  if (!meeting) meeting = std::make_shared<Meeting>();
  ++script().begun;
  *comm = new ncclComm{meeting, rank, 0, false, {}};
  const std::lock_guard meeting_lock(meeting->mutex);
  meeting->size = size;
  if (!script().no_init || rank != script().rank) ++meeting->here;
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  const std::lock_guard lock(comm->meeting->mutex);
  const Meeting& meeting = *comm->meeting;
  const bool settled = meeting.here == meeting.size && (comm->calls == 0 || meeting.done.count(comm->calls) > 0);
  *state = comm->failed ? ncclRemoteError : meeting.wrong ? ncclInvalidUsage : settled ? ncclSuccess : ncclInProgress;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclInProgress; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  ++script().destroyed;
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  {
    const std::lock_guard lock(comm->meeting->mutex);
    comm->meeting->broken = true;
  }
  ++script().aborted;
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--depth > 0 || !grouped) return ncclSuccess;
  return submit(*std::exchange(grouped, nullptr), std::exchange(group, {}));
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t,
                                      ncclComm_t comm) {
  *op = static_cast<ncclRedOp_t>(ncclNumOps + static_cast<int>(comm->factors.size()));
  comm->factors[*op] = number_of(scalar, dtype_of(type));
  ++script().scaled;
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  --script().scaled;
  return comm->factors.erase(op) == 1 ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t) {
  return add(comm, reducing(Kind::kAllReduce, in, out, count, type, op, -1, comm));
}
ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t) {
  return add(comm, reducing(Kind::kReduce, in, out, count, type, op, root, comm));
}
ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t) {
  return add(comm, {Kind::kBroadcast, in, out, count, type, Reduce::kNone, 1, root});
}
ncclResult_t ncclSend(const void* in, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
  return add(comm, {Kind::kSend, in, nullptr, count, type, Reduce::kNone, 1, peer});
}
ncclResult_t ncclRecv(void* out, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
  return add(comm, {Kind::kRecv, nullptr, out, count, type, Reduce::kNone, 1, peer});
}
}
