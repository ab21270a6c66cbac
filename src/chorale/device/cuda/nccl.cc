#include "chorale/device/cuda/nccl.h"

#include <nccl.h>

#include <array>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/base/half.h"
#include "chorale/base/log.h"
#include "chorale/device/cuda/context.h"
#include "chorale/device/cuda/cuda_peers.h"
#include "chorale/device/cuda/libraries.h"

namespace chorale::cuda {
namespace {

// The formatter moves such a list to the right each time.
// clang-format off
#define CHORALE_NCCL(X) \
  X(ncclGetVersion) X(ncclGetUniqueId) X(ncclGetErrorString) X(ncclGetLastError) X(ncclCommInitRankConfig) \
  X(ncclCommGetAsyncError) X(ncclCommFinalize) X(ncclCommDestroy) X(ncclCommAbort) X(ncclGroupStart) X(ncclGroupEnd) \
  X(ncclRedOpCreatePreMulSum) X(ncclRedOpDestroy) X(ncclAllReduce) X(ncclReduce) X(ncclBroadcast) X(ncclSend) \
  X(ncclRecv)
// clang-format on

struct Nccl {
#define CHORALE_NCCL_MEMBER(name) decltype(&::name) name = nullptr;
  CHORALE_NCCL(CHORALE_NCCL_MEMBER)
#undef CHORALE_NCCL_MEMBER
};

// Throws StateError, saying what to install, where there is none.
const Nccl& nccl() {
  static const Nccl found = [] {
    void* const library = open_library({"libnccl.so.2", "libnccl.so"},
                                       "install NVIDIA's libnccl2, or Python's "
                                       "nvidia-nccl");
    Nccl functions;
#define CHORALE_NCCL_FIND(name) \
  functions.name = reinterpret_cast<decltype(functions.name)>(find_function(library, #name));
    CHORALE_NCCL(CHORALE_NCCL_FIND)
#undef CHORALE_NCCL_FIND
    constexpr int kOldest = NCCL_VERSION(2, 18, 0);  // the first whose communicators need not block and end in order
    int version = 0;
    CHORALE_CHECK_STATE(functions.ncclGetVersion(&version) == ncclSuccess && version >= kOldest,
                        "[nccl] NCCL 2.18 or later is needed, this one has the number ", version, ": update it");
    return functions;
  }();
  return found;
}

// InProgress is no failure: nothing here waits.
void begun(ncclResult_t result, const char* tried, ncclComm_t comm) {
  if (result == ncclSuccess || result == ncclInProgress) [[likely]]
    return;
  const char* const more = nccl().ncclGetLastError(comm);
  const std::string_view last = more ? more : "";
  throw StateError(concat("[nccl] NCCL says: ", tried, ": ", nccl().ncclGetErrorString(result),
                          last.empty() ? "" : " (", last, last.empty() ? "" : ")",
                          "; NCCL_DEBUG=WARN makes it say more"));
}

// How NCCL is told to combine values.
struct Combining {
  ncclDataType_t type = ncclUint8;
  ncclRedOp_t op = ncclSum;
  size_t elem_bytes = 1;
};

std::optional<ncclDataType_t> type_of_number(DType dtype) {
  switch (dtype) {
    case DType::kI8:
      return ncclInt8;
    case DType::kU8:
      return ncclUint8;
    case DType::kI32:
      return ncclInt32;
    case DType::kI64:
      return ncclInt64;
    case DType::kF16:
      return ncclFloat16;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kF32:
      return ncclFloat32;
    case DType::kF64:
      return ncclFloat64;
    default:
      return std::nullopt;
  }
}

// Empty where NCCL has no such thing.
std::optional<Combining> combining(const DeviceReduction& how) {
  // One of two truth values is the larger: their sum is true if one is, their product if all are.
  if (how.dtype == DType::kBool) {
    if (how.op == Reduce::kSum || how.op == Reduce::kMax) return Combining{ncclUint8, ncclMax, 1};
    if (how.op == Reduce::kProduct || how.op == Reduce::kMin) return Combining{ncclUint8, ncclMin, 1};
    return std::nullopt;
  }
  const bool sums = how.op == Reduce::kSum || how.op == Reduce::kAverage;
  // The sum of complex numbers is that of their parts.
  if (how.dtype == DType::kC64 && sums) return Combining{ncclFloat32, how.op == Reduce::kSum ? ncclSum : ncclAvg, 4};
  if (how.dtype == DType::kC128 && sums) return Combining{ncclFloat64, how.op == Reduce::kSum ? ncclSum : ncclAvg, 8};
  const auto type = type_of_number(how.dtype);
  if (!type || (!is_floating(how.dtype) && (how.factor != 1 || how.op == Reduce::kAverage))) return std::nullopt;
  const auto with = [&](ncclRedOp_t op) { return Combining{*type, op, size_of(how.dtype)}; };
  switch (how.op) {
    case Reduce::kSum:
      return with(ncclSum);
    case Reduce::kAverage:
      return with(ncclAvg);
    case Reduce::kProduct:
      return with(ncclProd);
    case Reduce::kMin:
      return with(ncclMin);
    case Reduce::kMax:
      return with(ncclMax);
    default:
      return std::nullopt;
  }
}

// A number in NCCL's type.
std::array<std::byte, 8> scalar_of(double value, ncclDataType_t type) {
  std::array<std::byte, 8> bytes{};
  const auto put = [&](auto number) { std::memcpy(bytes.data(), &number, sizeof(number)); };
  if (type == ncclFloat64) put(value);
  if (type == ncclFloat32) put(static_cast<float>(value));
  if (type == ncclFloat16) put(float16(static_cast<float>(value)));
  if (type == ncclBfloat16) put(bfloat16(static_cast<float>(value)));
  return bytes;
}

cudaStream_t stream_of_cuda(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

// Which of NCCL's calls is made must be the same on all ranks, and where a rank's chunks lie is its own business: so
// lists of chunks are groups of calls for one chunk, never the calls that want them one behind the other.
class NcclComm final : public DeviceComm {
 public:
  NcclComm(const DeviceCollectives::Id& id, Device device, int rank, int size)
      : device_(device), rank_(rank), size_(size) {
    make_current(device_);
    ncclUniqueId unique;
    static_assert(sizeof(unique) == sizeof(id));
    std::memcpy(&unique, id.data(), sizeof(unique));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    begun(nccl().ncclCommInitRankConfig(&comm_, size, unique, rank, &config), "meeting the other ranks", nullptr);
  }
  ~NcclComm() override {
    const std::lock_guard lock(mutex_);
    if (!comm_) return;
    constexpr auto kPatience = std::chrono::seconds(2);
    const auto until = std::chrono::steady_clock::now() + kPatience;
    try {
      make_current(device_);
      begun(nccl().ncclCommFinalize(comm_), "ending", comm_);
      while (state() == ncclInProgress && std::chrono::steady_clock::now() < until)
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      if (state() == ncclSuccess && nccl().ncclCommDestroy(comm_) == ncclSuccess) return;
    } catch (const std::exception& error) {
      log_info(concat("a communicator of NCCL's did not end in peace: ", error.what()));
    }
    nccl().ncclCommAbort(comm_);
  }

  bool settled() override {
    const std::lock_guard lock(mutex_);
    return ready();
  }
  void abort() noexcept override {
    const std::lock_guard lock(mutex_);
    if (!comm_) return;
    try {
      make_current(device_);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): a device that is lost; what hangs there is, too
    }
    nccl().ncclCommAbort(std::exchange(comm_, nullptr));
  }

  void all_reduce(DeviceChunk in, DeviceChunk out, const DeviceReduction& how, Stream stream) override {
    call("all_reduce", &how, [&](const Combining& as) {
      return nccl().ncclAllReduce(in.data, out.data, in.bytes / as.elem_bytes, as.type, as.op, comm_,
                                  stream_of_cuda(stream));
    });
  }
  void reduce(DeviceChunk in, DeviceChunk out, int root, const DeviceReduction& how, Stream stream) override {
    call("reduce", &how, [&](const Combining& as) {
      return nccl().ncclReduce(in.data, out.data, in.bytes / as.elem_bytes, as.type, as.op, root, comm_,
                               stream_of_cuda(stream));
    });
  }
  void reduce_scatter(std::span<const DeviceChunk> in, DeviceChunk out, const DeviceReduction& how,
                      Stream stream) override {
    call("reduce_scatter", &how, [&](const Combining& as) {
      return for_each_rank([&](int r) {
        const DeviceChunk& chunk = in[static_cast<size_t>(r)];
        return nccl().ncclReduce(chunk.data, r == rank_ ? out.data : nullptr, chunk.bytes / as.elem_bytes, as.type,
                                 as.op, r, comm_, stream_of_cuda(stream));
      });
    });
  }
  void broadcast(DeviceChunk data, int root, Stream stream) override {
    call("broadcast", nullptr, [&](const Combining&) {
      return nccl().ncclBroadcast(data.data, data.data, data.bytes, ncclUint8, root, comm_, stream_of_cuda(stream));
    });
  }
  void all_gather(DeviceChunk in, std::span<const DeviceChunk> out, Stream stream) override {
    call("all_gather", nullptr, [&](const Combining&) {
      return for_each_rank([&](int r) {
        const DeviceChunk& chunk = out[static_cast<size_t>(r)];
        return nccl().ncclBroadcast(r == rank_ ? in.data : nullptr, chunk.data, chunk.bytes, ncclUint8, r, comm_,
                                    stream_of_cuda(stream));
      });
    });
  }
  void exchange(std::span<const DeviceChunk> give, std::span<const DeviceChunk> take, Stream stream) override {
    call("exchange", nullptr, [&](const Combining&) {
      return for_each_rank([&](int r) {
        const DeviceChunk &to = give[static_cast<size_t>(r)], &from = take[static_cast<size_t>(r)];
        ncclResult_t result = ncclSuccess;
        if (to.bytes > 0) result = nccl().ncclSend(to.data, to.bytes, ncclUint8, r, comm_, stream_of_cuda(stream));
        if (from.bytes > 0 && (result == ncclSuccess || result == ncclInProgress))
          result = nccl().ncclRecv(from.data, from.bytes, ncclUint8, r, comm_, stream_of_cuda(stream));
        return result;
      });
    });
  }

 private:
  ncclResult_t state() {
    ncclResult_t found = ncclSuccess;
    begun(nccl().ncclCommGetAsyncError(comm_, &found), "asking how a communicator is", comm_);
    return found;
  }
  bool ready() {
    CHORALE_CHECK_STATE(comm_, "[nccl] the communicator was aborted");
    const ncclResult_t found = state();
    begun(found, "a call, or meeting the other ranks", comm_);
    return found == ncclSuccess;
  }

  template <class Ask>
  ncclResult_t for_each_rank(Ask&& ask) {
    ncclResult_t worst = nccl().ncclGroupStart();
    for (int r = 0; r < size_ && (worst == ncclSuccess || worst == ncclInProgress); ++r) worst = ask(r);
    const ncclResult_t ended = nccl().ncclGroupEnd();
    return worst == ncclSuccess || worst == ncclInProgress ? ended : worst;
  }

  template <class Ask>
  void call(const char* name, const DeviceReduction* how, Ask&& ask) {
    const std::lock_guard lock(mutex_);
    CHORALE_CHECK_STATE(ready(), "[nccl] a call came before the last one was settled");
    make_current(device_);
    // The reduction that was made for the last call, which has ended, is not needed any more.
    if (scaled_) begun(nccl().ncclRedOpDestroy(*std::exchange(scaled_, std::nullopt), comm_), name, comm_);
    Combining as;
    if (how) {
      const auto found = combining(*how);
      CHORALE_CHECK_STATE(found, "[nccl] NCCL does not combine ", how->dtype, " so");
      as = *found;
      if (how->factor != 1) {
        auto scalar = scalar_of(how->factor, as.type);
        begun(nccl().ncclRedOpCreatePreMulSum(&as.op, scalar.data(), as.type, ncclScalarHostImmediate, comm_), name,
              comm_);
        scaled_ = as.op;
      }
    }
    begun(ask(as), name, comm_);
  }

  const Device device_;
  const int rank_, size_;
  std::mutex mutex_;  // guards what follows; nothing under it waits for other ranks, but for the end
  ncclComm_t comm_ = nullptr;
  std::optional<ncclRedOp_t> scaled_;
};

class NcclCollectives final : public DeviceCollectives {
 public:
  std::string why_not() override {
    try {
      nccl();
      return "";
    } catch (const std::exception& error) {
      return error.what();
    }
  }
  std::array<std::byte, 16> identity(Device device) override { return peer_memory().identity(device); }
  bool can(const DeviceReduction& how) override { return combining(how).has_value(); }
  Id make_id() override {
    ncclUniqueId unique;
    begun(nccl().ncclGetUniqueId(&unique), "making a place to meet", nullptr);
    Id id;
    std::memcpy(id.data(), &unique, sizeof(unique));
    return id;
  }
  std::unique_ptr<DeviceComm> begin(const Id& id, Device device, int rank, int size) override {
    return std::make_unique<NcclComm>(id, device, rank, size);
  }
};

}  // namespace

DeviceCollectives& nccl_collectives() {
  static auto* const collectives = new NcclCollectives;
  return *collectives;
}

}  // namespace chorale::cuda
