#include "chorale/device/cuda/cuda_peers.h"

#include <sys/random.h>

#include <cstring>
#include <map>
#include <mutex>

#include "chorale/base/error.h"
#include "chorale/device/cuda/compiler.h"
#include "chorale/device/cuda/context.h"

namespace chorale::cuda {

extern const std::string_view kPeersCu;

namespace {

uint64_t own_process() {
  static const uint64_t number = [] {
    uint64_t drawn = 0;
    CHORALE_CHECK_STATE(getrandom(&drawn, sizeof(drawn), 0) == sizeof(drawn), "[cuda] no random number to be had");
    return drawn;
  }();
  return number;
}

// What kernels see (peers.cu).
struct Sources {
  const void* from[PeerMemory::kMostSources] = {};
  int64_t count = 0;
  double factor = 1, divisor = 1;
};

CUfunction peer_kernel(Stream stream, const char* name, DType dtype) {
  const std::string whole = concat(name, "<", type_in_text(dtype), ">");
  return find_kernel(stream.device, whole, [&] {
    std::string text(prelude());
    text += kPeersCu;
    return KernelText{std::move(text), whole, /*contract=*/false};
  });
}
bool begins_at_16_bytes(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

class CudaPeers final : public PeerMemory {
 public:
  std::array<std::byte, 16> identity(Device device) override {
    CUuuid uuid{};
    check(driver().cuDeviceGetUuid(&uuid, facts_of(device).number), "asking which GPU this is");
    std::array<std::byte, 16> bytes{};
    static_assert(sizeof(uuid) == sizeof(bytes));
    std::memcpy(bytes.data(), &uuid, sizeof(bytes));
    return bytes;
  }

  PeerHandle make(Device device, size_t bytes) override {
    make_current(device);
    CUdeviceptr address = 0;
    check(driver().cuMemAlloc(&address, bytes), "taking memory that other ranks read");
    CUipcMemHandle handle{};
    check(driver().cuIpcGetMemHandle(&handle, address), "naming memory to other ranks");
    PeerHandle made{own_process(), static_cast<uint64_t>(address), bytes, {}};
    static_assert(sizeof(handle) == sizeof(made.handle));
    std::memcpy(made.handle.data(), &handle, sizeof(handle));
    return made;
  }

  const void* open(Device device, const PeerHandle& peer) override {
    if (peer.process == own_process()) return reinterpret_cast<const void*>(peer.address);
    const std::lock_guard lock(mutex_);
    const auto [place, added] = opened_.try_emplace({peer.process, peer.address}, nullptr);
    if (!place->second) {
      make_current(device);
      CUipcMemHandle handle{};
      std::memcpy(&handle, peer.handle.data(), sizeof(handle));
      CUdeviceptr address = 0;
      check(driver().cuIpcOpenMemHandle(&address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
            "mapping the memory of another rank");
      place->second = reinterpret_cast<const void*>(address);
    }
    return place->second;
  }

  void sum(std::span<const void* const> sources, DType dtype, double factor, double divisor, void* out, int64_t elems,
           Stream stream) override {
    make_current(stream.device);
    Sources s;
    s.count = static_cast<int64_t>(sources.size());
    s.factor = factor;
    s.divisor = divisor;
    bool aligned = begins_at_16_bytes(out);
    for (size_t r = 0; r < sources.size(); ++r) {
      s.from[r] = sources[r];
      aligned = aligned && begins_at_16_bytes(sources[r]);
    }
    const auto per_pack = static_cast<int64_t>(16 / size_of(dtype));
    const int64_t packs = sources.size() == 2 && aligned ? elems / per_pack : 0, done = packs * per_pack;
    if (packs > 0) {
      launch(peer_kernel(stream, "sum_two", dtype), {.x = blocks_for(stream.device, packs)}, stream, s, out, packs);
    }
    if (done == elems) return;
    const auto begin = static_cast<size_t>(done) * size_of(dtype);
    for (size_t r = 0; r < sources.size(); ++r) s.from[r] = static_cast<const std::byte*>(sources[r]) + begin;
    void* const rest = static_cast<std::byte*>(out) + begin;
    launch(peer_kernel(stream, "sum_sources", dtype), {.x = blocks_for(stream.device, elems - done)}, stream, s, rest,
           elems - done);
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<uint64_t, uint64_t>, const void*> opened_;
};

}  // namespace

PeerMemory& peer_memory() {
  static auto* const peers = new CudaPeers;
  return *peers;
}

}  // namespace chorale::cuda
